"""The rules for GPUs: Xids (error reports of NVIDIA's driver), SXids of NVSwitches, and what NVML reports."""

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
_MEMORY = "NVIDIA GPU memory error management (docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt)"
_SWITCH = "NVIDIA Fabric Manager user guide, appendix on SXids"
_NVML = "NVML API reference (docs.nvidia.com/deploy/nvml-api)"

_RESET = "Reset the GPU (nvidia-smi -r) or reboot the node before it is used again."
_REPLACE = "Reset the GPU; if it happens again, run NVIDIA's field diagnostics and have the GPU replaced."
_PROGRAM = "Look for the error in the program that used the GPU; suspect the GPU only if others' programs fail on it."


def _xid(number: int, category: str, action: str, cause: str, meaning: str, advice: str) -> Rule:
    said = f"Xid {number}: {meaning}"
    return Rule(f"xid.{number}", HAPPENED, 1, category, action, cause, said, advice, _CATALOG)


_XIDS = (
    _xid(8, SOFTWARE, WATCH, PROGRAM, "a channel of the GPU made no progress", _PROGRAM),
    _xid(11, SOFTWARE, WATCH, PROGRAM, "a stream of commands was invalid or corrupted", _PROGRAM),
    _xid(13, SOFTWARE, WATCH, PROGRAM, "an instruction or an address in a kernel was invalid", _PROGRAM),
    _xid(31, SOFTWARE, WATCH, PROGRAM, "a kernel accessed memory that is not mapped", _PROGRAM),
    _xid(32, HOST, WATCH, LINK, "a stream of commands was damaged", "Look for PCIe errors at the same time."),
    _xid(38, SOFTWARE, WATCH, PROGRAM, "the firmware of the driver failed", "Update the driver if it happens again."),
    _xid(43, SOFTWARE, WATCH, PROGRAM, "the GPU ended a program's work after an error of that program", _PROGRAM),
    _xid(45, SOFTWARE, WATCH, ELSEWHERE, "a program's work was cleared away", "Look for the error before this one."),
    _xid(48, DEVICE, EVICT, THIS, "an uncorrectable error of the GPU's memory", _REPLACE),
    _xid(54, HOST, DRAIN, THIS, "the GPU's auxiliary power is not connected", "Check the power cables of the GPU."),
    _xid(56, HOST, WATCH, THIS, "the display engine failed", "It does not concern computation."),
    _xid(61, DEVICE, EVICT, THIS, "a breakpoint of the GPU's microcontroller", _RESET),
    _xid(62, DEVICE, DRAIN, THIS, "the GPU's microcontroller halted", _RESET),
    _xid(
        63, DEVICE, WATCH, THIS, "a row of the GPU's memory will be replaced at its reset", "Reset it when it is idle."
    ),
    _xid(64, DEVICE, DRAIN, THIS, "a defective row of the GPU's memory could not be replaced", _REPLACE),
    _xid(68, SOFTWARE, WATCH, PROGRAM, "the video decoder failed", "It does not concern computation."),
    _xid(69, SOFTWARE, WATCH, PROGRAM, "a graphics class error", _PROGRAM),
    _xid(74, NETWORK, WATCH, LINK, "an NVLink failed", "Compare with the GPU or switch at the other end of the link."),
    _xid(79, HOST, DRAIN, THIS, "the GPU has fallen off the bus", "Reboot the node; check power, seating and heat."),
    _xid(92, DEVICE, WATCH, THIS, "many single-bit errors of the GPU's memory", "Run diagnostics when it is idle."),
    _xid(94, DEVICE, WATCH, THIS, "an uncorrectable memory error ended one program only", "Reset the GPU when idle."),
    _xid(95, DEVICE, DRAIN, THIS, "an uncorrectable memory error that could not be contained", _REPLACE),
    _xid(109, SOFTWARE, WATCH, PROGRAM, "a switch between programs on the GPU took too long", _PROGRAM),
    _xid(110, DEVICE, DRAIN, THIS, "a fault of the GPU's security", "Reboot the node; ask NVIDIA if it stays."),
    _xid(119, DEVICE, DRAIN, THIS, "the GPU's system processor (GSP) does not answer", _RESET),
    _xid(120, DEVICE, DRAIN, THIS, "the GPU's system processor (GSP) failed", _RESET),
    _xid(121, HOST, WATCH, THIS, "a corrected error of the link to the processor (C2C)", "Watch whether it grows."),
    _xid(122, DEVICE, WATCH, THIS, "the GPU's configuration memory could not be read", "Reset the GPU when idle."),
    _xid(123, DEVICE, WATCH, THIS, "the GPU's configuration memory could not be written", "Reset the GPU when idle."),
    _xid(136, NETWORK, WATCH, LINK, "the training of an NVLink failed", "Compare with the other end of the link."),
    _xid(137, SOFTWARE, WATCH, PROGRAM, "an NVLink access to memory that is not mapped", _PROGRAM),
    _xid(140, DEVICE, DRAIN, THIS, "uncorrected memory errors before the driver could react", _REPLACE),
    _xid(143, DEVICE, DRAIN, THIS, "the GPU could not be initialized", _RESET),
    *(
        _xid(number, NETWORK, WATCH, LINK, "an NVLink error (fifth generation)", "Compare with the other end.")
        for number in range(144, 151)
    ),
    _xid(154, DEVICE, WATCH, ELSEWHERE, "the recovery action of the GPU changed", "See the GPU's recovery action."),
    _xid(155, NETWORK, WATCH, LINK, "an error of NVLink's software", "Look for the NVLink errors before this one."),
    _xid(171, DEVICE, WATCH, THIS, "details of an uncorrectable error in DRAM", "See the Xid 48, 94 or 95 beside it."),
    _xid(172, DEVICE, WATCH, THIS, "details of an uncorrectable error in SRAM", "See the Xid 48, 94 or 95 beside it."),
    Rule(
        *("xid.*", HAPPENED, 1, SOFTWARE, WATCH, PROGRAM, "an Xid without a rule of its own"),
        *("Look it up in NVIDIA's catalog.", _CATALOG),
    ),
)


def _row(name: str, condition: str, limit: float, category: str, action: str, cause: str, *words: str) -> Rule:
    meaning, advice, source = words
    return Rule(name, condition, limit, category, action, cause, meaning, advice, source)


_RETRAIN = "Check the seating of the GPU and its riser; a reboot trains the link again."
_COOLING = "Check fans, air flow and the temperature of the room; a slow GPU holds up all others."
_CABLE = "Compare both ends of the link; a reset of both GPUs trains it again."

GPU_RULES = (
    *_XIDS,
    _row("log.gpu.off_the_bus", HAPPENED, 1, HOST, DRAIN, THIS, "the GPU has fallen off the bus", _RETRAIN, _CATALOG),
    _row("sxid.fatal", HAPPENED, 1, NETWORK, WATCH, LINK, "a fatal error of an NVSwitch", _CABLE, _SWITCH),
    _row("sxid.other", HAPPENED, 1, NETWORK, WATCH, LINK, "an error of an NVSwitch", _CABLE, _SWITCH),
    _row("gpu.lost", AT_LEAST, 1, HOST, DRAIN, THIS, "the GPU does not answer, or needs a reset", _RESET, _NVML),
    _row("gpu.recovery_action", AT_LEAST, 1, DEVICE, DRAIN, THIS, "the driver asks for a recovery", _RESET, _NVML),
    _row("gpu.rows.failed", AT_LEAST, 1, DEVICE, DRAIN, THIS, "a defective row cannot be replaced", _REPLACE, _MEMORY),
    _row("gpu.rows.pending", AT_LEAST, 1, DEVICE, WATCH, THIS, "rows are replaced at the reset", _RESET, _MEMORY),
    _row("gpu.rows.uncorrected", GREW, 1, DEVICE, WATCH, THIS, "a row failed uncorrectably", _REPLACE, _MEMORY),
    _row("gpu.pages.pending", AT_LEAST, 1, DEVICE, EVICT, THIS, "pages are retired at the reboot", _RESET, _MEMORY),
    _row("gpu.ecc.uncorrected", GREW, 1, DEVICE, WATCH, THIS, "uncorrectable memory errors", _REPLACE, _MEMORY),
    _row("gpu.ecc.corrected", GREW, 1000, DEVICE, WATCH, THIS, "many corrected memory errors", _REPLACE, _MEMORY),
    _row("gpu.throttled.heat_hardware", AT_LEAST, 1, HOST, WATCH, THIS, "heat slows the GPU down", _COOLING, _NVML),
    _row("gpu.throttled.heat_software", AT_LEAST, 1, HOST, WATCH, THIS, "heat slows the GPU down", _COOLING, _NVML),
    _row("gpu.throttled.power_brake", AT_LEAST, 1, HOST, WATCH, THIS, "the power supply brakes", _COOLING, _NVML),
    _row("gpu.temperature.margin", AT_MOST, 2, HOST, WATCH, THIS, "almost too hot, degrees left", _COOLING, _NVML),
    _row("gpu.pcie.replays", GREW, 100, HOST, WATCH, THIS, "packets repeated on PCIe", _RETRAIN, _NVML),
    _row("gpu.pcie.lanes_lost", ROSE, 1, HOST, WATCH, THIS, "the PCIe link lost lanes", _RETRAIN, _NVML),
    _row("nvlink.up", FELL, 1, NETWORK, WATCH, LINK, "an NVLink went down", _CABLE, _NVML),
    _row("nvlink.recoveries", GREW, 1, NETWORK, WATCH, LINK, "an NVLink was trained again", _CABLE, _NVML),
    _row("nvlink.replays", GREW, 100, NETWORK, WATCH, LINK, "packets repeated on an NVLink", _CABLE, _NVML),
    _row("nvlink.crc_flit", GREW, 1000, NETWORK, WATCH, LINK, "checksum errors of an NVLink", _CABLE, _NVML),
    _row("nvlink.crc_data", GREW, 1000, NETWORK, WATCH, LINK, "checksum errors of an NVLink", _CABLE, _NVML),
)
