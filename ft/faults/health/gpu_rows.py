"""The rules for GPUs: Xids (error reports of NVIDIA's driver), SXids of NVSwitches, and what NVML reports."""

from collections.abc import Iterable

from ft.faults.health.rule import (
    AT_LEAST,
    AT_MOST,
    DRAIN,
    ELSEWHERE,
    EVICT,
    FELL,
    GREW,
    HAPPENED,
    LINK,
    PROGRAM,
    ROSE,
    THIS,
    WATCH,
    Rule,
)
from ft.faults.verdict import DEVICE, HOST, NETWORK, SOFTWARE

_CATALOG = "NVIDIA Xid catalog (docs.nvidia.com/deploy/xid-errors)"
_DRIVER = "NVIDIA open-gpu-kernel-modules"
_NAMES = f"{_DRIVER}, nverror.h"
_MEMORY = "NVIDIA GPU memory error management (docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt)"
_SWITCH = "NVIDIA Fabric Manager user guide, appendix on SXids"
_NVML = "NVML API reference (docs.nvidia.com/deploy/nvml-api)"

_RESET = "Reset the GPU (nvidia-smi -r) or reboot the node before it is used again."
_REPLACE = "Reset the GPU; if it happens again, run NVIDIA's field diagnostics and have the GPU replaced."
_LATER = "Reset the GPU when it is idle."
_PROGRAM = "Look for the error in the program that used the GPU; suspect the GPU only if others' programs fail on it."
_COMMANDS = "Look for the error in the program; PCIe errors at the same time speak for the way to the GPU."
_AGAIN = "Start the program again; ask NVIDIA if it happens on this GPU only."
_UPDATE = "Update the driver if it happens again."
_NOT_COMPUTE = "It does not concern computation."
_ENDS = "Compare with the GPU or switch at the other end of the link."
_SEE = "See the Xid 154 beside it, if there is one: it says what the driver asks for."
_SPARE = "Watch whether it grows; have the GPU replaced at the next occasion if it does."
_REBOOT = "Reboot the node before the GPU is used again."


def _xid(
    number: int | str, category: str, action: str, cause: str, meaning: str, advice: str, source: str = _CATALOG
) -> Rule:
    """Return the rule for an Xid. ``number``: with a suffix, an Xid whose text says more than its number."""
    bare = str(number).partition(".")[0]
    said, where = f"Xid {bare}: {meaning}", f"{source}, Xid {bare}"
    return Rule(f"xid.{number}", HAPPENED, 1, category, action, cause, said, advice, where)


def _xids(numbers: Iterable[int], *how: str) -> tuple[Rule, ...]:
    return tuple(_xid(number, *how) for number in numbers)


_COPY_ENGINES = (*range(39, 42), *range(70, 73), *range(75, 78), 85, *range(126, 136))
_VIDEO = (47, 65, 68, 73, *range(82, 85), 86, 88, 89, *range(96, 106), 139, 142)

_OF_PROGRAMS = (
    _xid(8, SOFTWARE, WATCH, PROGRAM, "a channel of the GPU made no progress", _PROGRAM),
    *_xids((11, 25, 32), SOFTWARE, WATCH, PROGRAM, "a stream of commands was invalid or damaged", _COMMANDS),
    _xid(13, SOFTWARE, WATCH, PROGRAM, "an instruction or an address in a kernel was invalid", _PROGRAM),
    _xid(31, SOFTWARE, WATCH, PROGRAM, "a kernel accessed memory that is not mapped", _PROGRAM),
    _xid(37, SOFTWARE, WATCH, PROGRAM, "the driver's firmware was asked for what it does not know", _UPDATE),
    _xid(38, SOFTWARE, WATCH, PROGRAM, "the firmware that switches between programs was too slow", _UPDATE),
    *_xids(_COPY_ENGINES, SOFTWARE, WATCH, PROGRAM, "a copy engine could not do what a program asked for", _AGAIN),
    _xid(43, SOFTWARE, WATCH, PROGRAM, "the GPU ended a program's work after an error of that program", _PROGRAM),
    _xid(44, SOFTWARE, WATCH, PROGRAM, "a fault while the GPU switched between programs", _AGAIN),
    _xid(60, SOFTWARE, WATCH, PROGRAM, "an auxiliary processor of the GPU failed for a program", _AGAIN),
    *_xids((66, 67), SOFTWARE, WATCH, PROGRAM, "the driver accessed what it must not", _UPDATE),
    *_xids(_VIDEO, SOFTWARE, WATCH, PROGRAM, "an engine for video, JPEG or optical flow failed", _NOT_COMPUTE),
    _xid(69, SOFTWARE, WATCH, PROGRAM, "a program used a class of the GPU wrongly", _PROGRAM),
    _xid(78, SOFTWARE, WATCH, PROGRAM, "a virtual GPU could not be started", _UPDATE),
    *_xids((106, 107), SOFTWARE, WATCH, ELSEWHERE, "a test message of the management controller", "Do nothing."),
    *_xids((108, 137), SOFTWARE, WATCH, PROGRAM, "a request over NVLink was refused, as of a wrong address", _PROGRAM),
    _xid(141, SOFTWARE, WATCH, PROGRAM, "a fast path of CUDA failed", _AGAIN),
    _xid(174, SOFTWARE, WATCH, PROGRAM, "the driver ended a program", _PROGRAM, _NAMES),
)

_OF_MEMORY = (
    _xid(48, DEVICE, EVICT, THIS, "an uncorrectable error of the GPU's memory", _REPLACE),
    _xid(58, DEVICE, WATCH, THIS, "an error of the GPU's memory", _LATER, _NAMES),
    _xid(63, DEVICE, WATCH, THIS, "a row of the GPU's memory will be replaced at its reset", _LATER),
    _xid(64, DEVICE, DRAIN, THIS, "a defective row of the GPU's memory could not be replaced", _REPLACE),
    _xid(92, DEVICE, WATCH, THIS, "many single-bit errors of the GPU's memory", "Run diagnostics when it is idle."),
    _xid("94.reset", DEVICE, EVICT, THIS, "a contained memory error; the driver asks for a reset", _RESET),
    _xid(94, DEVICE, WATCH, THIS, "an uncorrectable memory error ended one program only", _LATER),
    _xid(95, DEVICE, DRAIN, THIS, "an uncorrectable memory error that could not be contained", _REPLACE),
    _xid(140, DEVICE, DRAIN, THIS, "uncorrected memory errors before the driver could react", _REPLACE),
    _xid(156, DEVICE, WATCH, THIS, "a defective part of the GPU will be taken out of use at its reset", _LATER),
    _xid(157, DEVICE, WATCH, THIS, "a defective part of the GPU could not be taken out of use", _REPLACE),
    _xid(160, DEVICE, WATCH, THIS, "a channel of the GPU was taken out of use", _LATER),
    _xid(161, DEVICE, WATCH, THIS, "a channel of the GPU could not be taken out of use", _REPLACE),
    _xid(168, DEVICE, WATCH, THIS, "the GPU has less memory than before", _SEE),
    _xid(171, DEVICE, WATCH, THIS, "details of an uncorrectable error in DRAM", "See the Xid 48, 94 or 95 beside it."),
    _xid(172, DEVICE, WATCH, THIS, "details of an uncorrectable error in SRAM", "See the Xid 48, 94 or 95 beside it."),
    _xid(185, DEVICE, WATCH, THIS, "spare memory was taken into use", _SPARE, "NVIDIA GPU Operational Events, R620"),
)

_OF_DEVICES = (
    _xid(46, DEVICE, DRAIN, THIS, "the GPU did not go on with its work", _RESET),
    _xid(54, HOST, DRAIN, THIS, "the GPU's auxiliary power is not connected", "Check the power cables of the GPU."),
    _xid(56, HOST, WATCH, THIS, "the display engine failed", _NOT_COMPUTE),
    _xid(61, DEVICE, WATCH, THIS, "a breakpoint of the GPU's microcontroller", _LATER),
    _xid(62, DEVICE, DRAIN, THIS, "the GPU's microcontroller halted", _RESET),
    _xid(79, HOST, DRAIN, THIS, "the GPU has fallen off the bus", "Reboot the node; check power, seating and heat."),
    _xid(80, HOST, WATCH, LINK, "commands were damaged on their way to the GPU", _COMMANDS),
    _xid(93, DEVICE, WATCH, THIS, "the GPU's configuration memory is worn", _SPARE),
    _xid(109, DEVICE, EVICT, THIS, "a switch between programs on the GPU took too long", _RESET),
    _xid(110, DEVICE, DRAIN, THIS, "a fault of the GPU's security", "Cut the power of the node; a reset does not do."),
    _xid(119, DEVICE, DRAIN, THIS, "the GPU's system processor (GSP) does not answer", _RESET),
    _xid(120, DEVICE, DRAIN, THIS, "the GPU's system processor (GSP) failed", _RESET),
    _xid(121, HOST, WATCH, THIS, "a corrected error of the link to the processor (C2C)", "Watch whether it grows."),
    *(
        _xid(number, DEVICE, WATCH, THIS, "the GPU's configuration memory failed", _LATER, _NAMES)
        for number in (122, 123, 124, 125)
    ),
    _xid(143, DEVICE, DRAIN, THIS, "the GPU could not be initialized", _RESET),
    _xid(151, HOST, WATCH, THIS, "keys of confidential computing could not be changed", "Restart the virtual machine."),
    _xid(158, DEVICE, DRAIN, THIS, "the GPU did not answer in time", _RESET),
    _xid(159, HOST, WATCH, LINK, "an error of the bus between processor and GPU", "Look for errors of the processor."),
    *_xids((162, 163, 164, 165), HOST, WATCH, THIS, "the state of the GPU's power smoothing changed", _SPARE),
    _xid(167, HOST, WATCH, THIS, "a request over PCIe was not answered", _SEE),
    _xid(169, DEVICE, WATCH, THIS, "the GPU's security processor halted", _SEE),
    _xid(173, HOST, WATCH, THIS, "the link to the processor (C2C) failed", _SEE, _NAMES),
    _xid(175, DEVICE, DRAIN, THIS, "the GPU's memory system does not answer", _RESET, f"{_DRIVER}, kernel_gsp.c"),
    _xid(176, HOST, WATCH, THIS, "many corrected PCIe errors", _SEE, _NAMES),
)

_OF_LINKS = (
    _xid(74, NETWORK, WATCH, LINK, "an NVLink failed", _ENDS),
    _xid(136, NETWORK, WATCH, LINK, "the training of an NVLink failed", _ENDS),
    # By the catalog's table of these errors, the fatal ones of these three units are the GPU's own and need a reset.
    *(
        _xid(f"{number}.fatal", DEVICE, DRAIN, THIS, "a unit of the GPU for NVLink failed", _RESET)
        for number in (144, 145, 146)
    ),
    *(_xid(f"{number}.fatal", NETWORK, WATCH, LINK, "an NVLink failed", _ENDS) for number in (147, 148, 149)),
    *_xids(range(144, 150), NETWORK, WATCH, LINK, "an NVLink error (fifth generation)", _ENDS),
    _xid(150, DEVICE, DRAIN, THIS, "the GPU's firmware for NVLink stopped", _RESET),
    _xid(155, NETWORK, WATCH, LINK, "an NVLink was taken down by software", "Look for NVLink errors before this one."),
    *_xids((166, 170), NETWORK, WATCH, LINK, "an error of encrypted NVLink traffic", _ENDS),
)


def _asked(name: str, category: str, action: str, cause: str, meaning: str, advice: str) -> tuple[Rule, Rule]:
    """Return the rules for what the driver asks for: as Xid 154 says it, and as NVML says it at present."""
    said = f"the driver asks for {meaning}"
    state = f"{_NVML}, NVML_GPU_RECOVERY_ACTION"
    return (
        _xid(f"154.{name}", category, action, cause, said, advice),
        Rule(f"gpu.recovery.{name}", AT_LEAST, 1, category, action, cause, said, advice, state),
    )


_RECOVERIES = (
    *_asked("gpu_reset", DEVICE, DRAIN, THIS, "a reset of the GPU", _RESET),
    *_asked("bus_reset", HOST, DRAIN, THIS, "a reset of the GPU's bus", _REBOOT),
    *_asked("node_reboot", HOST, DRAIN, THIS, "a reboot of the node", _REBOOT),
    *_asked("system_reboot", HOST, DRAIN, THIS, "a reboot of the system", _REBOOT),
    # The GPU still works, and these are also asked for when the other end of an NVLink has failed.
    *_asked("drain_and_reset", DEVICE, WATCH, LINK, "a reset when the GPU's work has ended", _LATER),
    *_asked("drain_p2p", NETWORK, WATCH, LINK, "an end of all traffic between GPUs", "End what uses NVLink."),
    *_asked("recover_imex_domain", NETWORK, WATCH, ELSEWHERE, "a recovery of the IMEX domain", "Check its service."),
    *_asked("unknown", DEVICE, WATCH, ELSEWHERE, "what is not known here", "Look it up in NVIDIA's documents."),
)

_OTHERS = (
    _xid(45, SOFTWARE, WATCH, ELSEWHERE, "a program's work was cleared away", "Look for the error before this one."),
    _xid(154, DEVICE, WATCH, ELSEWHERE, "the recovery action of the GPU changed", "See the GPU's recovery action."),
    Rule(
        *("xid.*", HAPPENED, 1, SOFTWARE, WATCH, PROGRAM, "an Xid without a rule of its own"),
        *("Look it up in NVIDIA's catalog.", _CATALOG),
    ),
)

_XIDS = (*_OF_PROGRAMS, *_OF_MEMORY, *_OF_DEVICES, *_OF_LINKS, *_RECOVERIES, *_OTHERS)


def _row(name: str, condition: str, limit: float, category: str, action: str, cause: str, *words: str) -> Rule:
    meaning, advice, source = words
    return Rule(name, condition, limit, category, action, cause, meaning, advice, source)


_RETRAIN = "Check the seating of the GPU and its riser; a reboot trains the link again."
_COOLING = "Check fans, air flow and the temperature of the room; a slow GPU holds up all others."
_POWER = "Check the power supplies and what limits them; a slow GPU holds up all others."
_CABLE = "Compare both ends of the link; a reset of both GPUs trains it again."
_NVSWITCH = "Reboot the node, which resets its NVSwitches and all their GPUs."
_MANAGER = "Check NVIDIA's Fabric Manager (systemctl status nvidia-fabricmanager) and the NVSwitches."
_SRAM = "Have the GPU replaced: NVIDIA counts this as a defect."
_INIT = f"{_DRIVER}, osinit.c"
_BOUND = f"{_NVML}, nvmlEccSramErrorStatus_t"
_FABRIC = f"{_NVML}, nvmlGpuFabricInfoV_t"
_FIELDS = f"{_NVML}, NVML_FI_DEV_NVLINK_COUNT fields"

GPU_RULES = (
    *_XIDS,
    _row("log.gpu.off_the_bus", HAPPENED, 1, HOST, DRAIN, THIS, "the GPU has fallen off the bus", _RETRAIN, _CATALOG),
    _row("log.gpu.init", HAPPENED, 1, DEVICE, DRAIN, THIS, "the driver could not initialize the GPU", _RESET, _INIT),
    _row("sxid.switch", HAPPENED, 1, HOST, DRAIN, THIS, "an NVSwitch of the node failed", _NVSWITCH, _SWITCH),
    _row("sxid.heat", HAPPENED, 1, HOST, WATCH, THIS, "heat slows an NVSwitch down", _COOLING, _SWITCH),
    _row("sxid.fatal", HAPPENED, 1, NETWORK, WATCH, LINK, "a fatal error of an NVSwitch", _CABLE, _SWITCH),
    _row("sxid.corrected", HAPPENED, 100, NETWORK, WATCH, LINK, "many corrected NVSwitch errors", _CABLE, _SWITCH),
    _row("sxid.other", HAPPENED, 1, NETWORK, WATCH, LINK, "an error of an NVSwitch", _CABLE, _SWITCH),
    _row("gpu.lost", AT_LEAST, 1, HOST, DRAIN, THIS, "the GPU does not answer, or needs a reset", _RESET, _NVML),
    _row("gpu.rows.failed", AT_LEAST, 1, DEVICE, DRAIN, THIS, "a defective row cannot be replaced", _REPLACE, _MEMORY),
    _row("gpu.rows.pending", AT_LEAST, 1, DEVICE, WATCH, THIS, "rows are replaced at the reset", _LATER, _MEMORY),
    _row("gpu.rows.uncorrected", GREW, 1, DEVICE, WATCH, THIS, "a row failed uncorrectably", _REPLACE, _MEMORY),
    _row("gpu.rows.banks_without_spare", ROSE, 1, DEVICE, WATCH, THIS, "a bank has no spare rows", _SPARE, _MEMORY),
    _row("gpu.sram.over_threshold", AT_LEAST, 1, DEVICE, EVICT, THIS, "too many errors of the SRAM", _SRAM, _BOUND),
    _row("gpu.pages.pending", AT_LEAST, 1, DEVICE, EVICT, THIS, "pages are retired at the reboot", _RESET, _MEMORY),
    _row("gpu.ecc.uncorrected", GREW, 1, DEVICE, WATCH, THIS, "uncorrectable memory errors", _REPLACE, _MEMORY),
    _row("gpu.ecc.corrected", GREW, 1000, DEVICE, WATCH, THIS, "many corrected memory errors", _REPLACE, _MEMORY),
    _row("gpu.throttled.heat_hardware", AT_LEAST, 1, HOST, WATCH, THIS, "heat slows the GPU down", _COOLING, _NVML),
    _row("gpu.throttled.heat_software", AT_LEAST, 1, HOST, WATCH, THIS, "heat slows the GPU down", _COOLING, _NVML),
    _row("gpu.throttled.power_brake", AT_LEAST, 1, HOST, WATCH, THIS, "the power supply brakes", _POWER, _NVML),
    _row("gpu.throttled.hardware", AT_LEAST, 1, HOST, WATCH, THIS, "hardware slows the GPU down", _POWER, _NVML),
    _row("gpu.temperature.margin", AT_MOST, 2, HOST, WATCH, THIS, "almost too hot, degrees left", _COOLING, _NVML),
    _row("gpu.fabric.unready", AT_LEAST, 1, NETWORK, WATCH, ELSEWHERE, "NVLink is not set up yet", _MANAGER, _FABRIC),
    _row("gpu.fabric.failed", AT_LEAST, 1, NETWORK, WATCH, ELSEWHERE, "NVLink cannot be used", _MANAGER, _FABRIC),
    _row("gpu.fabric.unhealthy", AT_LEAST, 1, NETWORK, WATCH, LINK, "faults of the NVLink fabric", _MANAGER, _FABRIC),
    _row("gpu.pcie.replays", GREW, 100, HOST, WATCH, THIS, "packets repeated on PCIe", _RETRAIN, _NVML),
    _row("gpu.pcie.lanes_lost", ROSE, 1, HOST, WATCH, THIS, "the PCIe link lost lanes", _RETRAIN, _NVML),
    _row("nvlink.up", FELL, 1, NETWORK, WATCH, LINK, "an NVLink went down", _CABLE, _NVML),
    _row("nvlink.recoveries", GREW, 1, NETWORK, WATCH, LINK, "an NVLink was trained again", _CABLE, _NVML),
    _row("nvlink.recoveries_failed", GREW, 1, NETWORK, WATCH, LINK, "an NVLink could not recover", _CABLE, _FIELDS),
    _row("nvlink.replays", GREW, 100, NETWORK, WATCH, LINK, "packets repeated on an NVLink", _CABLE, _NVML),
    _row("nvlink.crc_flit", GREW, 1000, NETWORK, WATCH, LINK, "checksum errors of an NVLink", _CABLE, _NVML),
    _row("nvlink.crc_data", GREW, 1000, NETWORK, WATCH, LINK, "checksum errors of an NVLink", _CABLE, _NVML),
    _row("nvlink.receive_errors", GREW, 10, NETWORK, WATCH, LINK, "damaged packets on an NVLink", _CABLE, _FIELDS),
    _row("nvlink.integrity_errors", GREW, 1, NETWORK, WATCH, LINK, "link errors of an NVLink", _CABLE, _FIELDS),
    _row("nvlink.symbol_errors", GREW, 10, NETWORK, WATCH, LINK, "symbol errors of an NVLink", _CABLE, _FIELDS),
)
