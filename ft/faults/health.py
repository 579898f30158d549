"""Judges what a node says of itself: rules as data, from an observation to the class of fault and what to do.

The readings are those of :mod:`ft.platform.health`. Everything here is pure: no clock, no I/O. ``GPU_RULES`` are the
rules for GPUs, NVLinks and NVSwitches; ``NODE_RULES`` those for the rest of a node: network ports, memory, PCIe, disks,
clock and processors. :func:`informed` says what the findings make of a guess: the verdict on a failed worker by the
text of its exception alone."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ft.faults.verdict import DEVICE, HOST, NETWORK, REPLACE, RESTART, RETRY, SEVERITY, SOFTWARE, Verdict
from ft.platform.health.observation import COUNTER, EVENT, GAUGE, Observation, Reading, differences

WATCH, EVICT, DRAIN = "watch", "evict at the next step", "drain"
ACTIONS = (WATCH, EVICT, DRAIN)
"""What is to be done, from the mildest to the most severe.

- watch: nothing but to tell people.
- evict at the next step: the device still works, but its worker is to move elsewhere at the end of a step.
- drain: the device or node cannot be relied on any more; nothing new is to be started there.
"""

HAPPENED, GREW = "happened", "grew by"
AT_LEAST, AT_MOST = "is at least", "is at most"
ROSE, FELL, MOVED = "rose by", "fell by", "moved by"
"""Conditions: ``HAPPENED`` is for events, ``GREW`` for counters and the others for present values. ``GREW`` and the
last three compare with the reading before. The limit of ``HAPPENED`` is a number of events in one reading."""

THIS, LINK, PROGRAM, ELSEWHERE = "this device", "a link with two ends", "a program", "an earlier fault"
"""Where the cause is: in the device or node that reports it, in a link whose other end may be at fault, in what a
program does, or in a fault that was reported before or by another device."""


@dataclass(frozen=True)
class Rule:
    """A rule of health.

    Attributes:
        observation: name of the observation; with "*" at its end, all names that begin so.
        cause: where the cause is. Only a fault of this device is a reason to act against it.
        meaning: what was observed, as the beginning of a sentence.
        advice: what a person should do, as a sentence.
        source: where the meaning of the observation is written down.
    """

    observation: str
    condition: str
    limit: float
    category: str
    action: str
    cause: str
    meaning: str
    advice: str
    source: str

    def __post_init__(self) -> None:
        """Check that no device suffers for what another one, or a program, may have done.

        Raises:
            ValueError: the rule acts against a device although the cause may lie elsewhere.
        """
        if self.action != WATCH and self.cause != THIS:
            raise ValueError(f"{self.observation}: {self.action}, although the cause is {self.cause}")

    def is_about(self, observation: str) -> bool:
        """Return whether the rule is about observations of this name."""
        if self.observation.endswith("*"):
            return observation.startswith(self.observation[:-1])
        return observation == self.observation


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
    Rule("log.gpu.off_the_bus", HAPPENED, 1, HOST, DRAIN, THIS, "the GPU has fallen off the bus", _RETRAIN, _CATALOG),
    Rule("log.gpu.init", HAPPENED, 1, DEVICE, DRAIN, THIS, "the driver could not initialize the GPU", _RESET, _INIT),
    Rule("sxid.switch", HAPPENED, 1, HOST, DRAIN, THIS, "an NVSwitch of the node failed", _NVSWITCH, _SWITCH),
    Rule("sxid.heat", HAPPENED, 1, HOST, WATCH, THIS, "heat slows an NVSwitch down", _COOLING, _SWITCH),
    Rule("sxid.fatal", HAPPENED, 1, NETWORK, WATCH, LINK, "a fatal error of an NVSwitch", _CABLE, _SWITCH),
    Rule("sxid.corrected", HAPPENED, 100, NETWORK, WATCH, LINK, "many corrected NVSwitch errors", _CABLE, _SWITCH),
    Rule("sxid.other", HAPPENED, 1, NETWORK, WATCH, LINK, "an error of an NVSwitch", _CABLE, _SWITCH),
    Rule("gpu.lost", AT_LEAST, 1, HOST, DRAIN, THIS, "the GPU does not answer, or needs a reset", _RESET, _NVML),
    Rule("gpu.rows.failed", AT_LEAST, 1, DEVICE, DRAIN, THIS, "a defective row cannot be replaced", _REPLACE, _MEMORY),
    Rule("gpu.rows.pending", AT_LEAST, 1, DEVICE, WATCH, THIS, "rows are replaced at the reset", _LATER, _MEMORY),
    Rule("gpu.rows.uncorrected", GREW, 1, DEVICE, WATCH, THIS, "a row failed uncorrectably", _REPLACE, _MEMORY),
    Rule("gpu.rows.banks_without_spare", ROSE, 1, DEVICE, WATCH, THIS, "a bank has no spare rows", _SPARE, _MEMORY),
    Rule("gpu.sram.over_threshold", AT_LEAST, 1, DEVICE, EVICT, THIS, "too many errors of the SRAM", _SRAM, _BOUND),
    Rule("gpu.pages.pending", AT_LEAST, 1, DEVICE, EVICT, THIS, "pages are retired at the reboot", _RESET, _MEMORY),
    Rule("gpu.ecc.uncorrected", GREW, 1, DEVICE, WATCH, THIS, "uncorrectable memory errors", _REPLACE, _MEMORY),
    Rule("gpu.ecc.corrected", GREW, 1000, DEVICE, WATCH, THIS, "many corrected memory errors", _REPLACE, _MEMORY),
    Rule("gpu.throttled.heat_hardware", AT_LEAST, 1, HOST, WATCH, THIS, "heat slows the GPU down", _COOLING, _NVML),
    Rule("gpu.throttled.heat_software", AT_LEAST, 1, HOST, WATCH, THIS, "heat slows the GPU down", _COOLING, _NVML),
    Rule("gpu.throttled.power_brake", AT_LEAST, 1, HOST, WATCH, THIS, "the power supply brakes", _POWER, _NVML),
    Rule("gpu.throttled.hardware", AT_LEAST, 1, HOST, WATCH, THIS, "hardware slows the GPU down", _POWER, _NVML),
    Rule("gpu.temperature.margin", AT_MOST, 2, HOST, WATCH, THIS, "almost too hot, degrees left", _COOLING, _NVML),
    Rule("gpu.fabric.unready", AT_LEAST, 1, NETWORK, WATCH, ELSEWHERE, "NVLink is not set up yet", _MANAGER, _FABRIC),
    Rule("gpu.fabric.failed", AT_LEAST, 1, NETWORK, WATCH, ELSEWHERE, "NVLink cannot be used", _MANAGER, _FABRIC),
    Rule("gpu.fabric.unhealthy", AT_LEAST, 1, NETWORK, WATCH, LINK, "faults of the NVLink fabric", _MANAGER, _FABRIC),
    Rule("gpu.pcie.replays", GREW, 100, HOST, WATCH, THIS, "packets repeated on PCIe", _RETRAIN, _NVML),
    Rule("gpu.pcie.lanes_lost", ROSE, 1, HOST, WATCH, THIS, "the PCIe link lost lanes", _RETRAIN, _NVML),
    Rule("nvlink.up", FELL, 1, NETWORK, WATCH, LINK, "an NVLink went down", _CABLE, _NVML),
    Rule("nvlink.recoveries", GREW, 1, NETWORK, WATCH, LINK, "an NVLink was trained again", _CABLE, _NVML),
    Rule("nvlink.recoveries_failed", GREW, 1, NETWORK, WATCH, LINK, "an NVLink could not recover", _CABLE, _FIELDS),
    Rule("nvlink.replays", GREW, 100, NETWORK, WATCH, LINK, "packets repeated on an NVLink", _CABLE, _NVML),
    Rule("nvlink.crc_flit", GREW, 1000, NETWORK, WATCH, LINK, "checksum errors of an NVLink", _CABLE, _NVML),
    Rule("nvlink.crc_data", GREW, 1000, NETWORK, WATCH, LINK, "checksum errors of an NVLink", _CABLE, _NVML),
    Rule("nvlink.receive_errors", GREW, 10, NETWORK, WATCH, LINK, "damaged packets on an NVLink", _CABLE, _FIELDS),
    Rule("nvlink.integrity_errors", GREW, 1, NETWORK, WATCH, LINK, "link errors of an NVLink", _CABLE, _FIELDS),
    Rule("nvlink.symbol_errors", GREW, 10, NETWORK, WATCH, LINK, "symbol errors of an NVLink", _CABLE, _FIELDS),
)


_INFINIBAND = "Linux kernel, Documentation/ABI/stable/sysfs-class-infiniband"
_COUNTERS = "NVIDIA MLNX_OFED, understanding mlx5 Linux counters"
_INTERFACE = "Linux kernel, Documentation/networking/statistics.rst"
_MLX5 = "Linux kernel, drivers/net/ethernet/mellanox/mlx5/core (health.c, events.c)"
_EDAC = "Linux kernel, Documentation/admin-guide/ras.rst"
_PCIE = "Linux kernel, Documentation/PCI/pcieaer-howto.rst"
_AER = "Linux kernel, Documentation/ABI/testing/sysfs-bus-pci-devices-aer_stats"
_DPC = "Linux kernel, drivers/pci/pcie/dpc.c"
_LIMITED = "Linux kernel, drivers/pci/pci.c (pcie_report_downtraining), and imbue-ai/cluster-health"
_LINK_WIDTH = "Linux kernel, Documentation/ABI/testing/sysfs-bus-pci"
_NFS = "Linux kernel, fs/nfs and net/sunrpc, and leptonai/gpud, components/nfs"
_PROC = "Linux kernel, Documentation/filesystems/proc.rst"
_NVME = "Linux kernel, drivers/nvme/host"
_BLOCK = "Linux kernel, block/blk-core.c"
_CLOCK = "adjtimex(2), and Linux kernel, kernel/time/clocksource.c"
_LOCKUP = "Linux kernel, Documentation/admin-guide/lockup-watchdogs.rst"
_HOT = "Linux kernel, drivers/thermal/intel/therm_throt.c"
_HOTPLUG = "Linux kernel, Documentation/core-api/cpu_hotplug.rst"

_PORT_CABLE = "Check cable and transceiver, and compare with the switch port at the other end."
_PEER = (
    "Compare with the node at the other end and with the switches between: a counter does not say whose fault it is."
)
_ADAPTER = "Reset the network adapter or reboot the node before it is used again; update the adapter's firmware."
_SLOT = "Check the slot, its riser and its power, and what the firmware has set for it."
_DIMM = "Find the memory module (EDAC names it) and have it replaced."
_DIAGNOSTICS = "Drain the node and run hardware diagnostics."
_LESS_MEMORY = "Give the job less host memory per node (snapshots, data loaders), or find what else runs there."
_DISK = "Check the disk with its own diagnostics, and have it replaced if the errors go on."
_SERVER = "Check the file server and the network to it: all nodes that use it wait as well."
_ROOM = "Make room on this disk, or choose another folder."
_TIME = "Check the time service (chrony, ntpd) of the node."
_HEAT = "Check fans and the temperature of the room; a slow node holds up all others."


_PORTS = (
    Rule("port.up", FELL, 1, NETWORK, WATCH, LINK, "a network port went down", _PORT_CABLE, _INFINIBAND),
    Rule("port.rate", FELL, 1, NETWORK, WATCH, LINK, "a network port became slower", _PORT_CABLE, _INFINIBAND),
    Rule("port.link_downed", GREW, 1, NETWORK, WATCH, LINK, "a network link was lost", _PORT_CABLE, _INFINIBAND),
    Rule(
        "port.link_error_recovery", GREW, 1, NETWORK, WATCH, LINK, "a link was trained again", _PORT_CABLE, _INFINIBAND
    ),
    Rule("port.symbol_error", GREW, 10, NETWORK, WATCH, LINK, "symbol errors of a link", _PORT_CABLE, _INFINIBAND),
    Rule("port.local_link_integrity_errors", GREW, 1, NETWORK, WATCH, LINK, "link errors", _PORT_CABLE, _INFINIBAND),
    Rule("port.port_rcv_errors", GREW, 10, NETWORK, WATCH, LINK, "damaged packets arrived", _PORT_CABLE, _INFINIBAND),
    Rule("port.port_rcv_remote_physical_errors", GREW, 10, NETWORK, WATCH, LINK, "bad packets", _PEER, _INFINIBAND),
    Rule("port.excessive_buffer_overrun_errors", GREW, 1, NETWORK, WATCH, LINK, "overruns", _PEER, _INFINIBAND),
    Rule("port.port_xmit_discards", GREW, 100, NETWORK, WATCH, LINK, "packets not sent", _PEER, _INFINIBAND),
    Rule("port.local_ack_timeout_err", GREW, 10, NETWORK, WATCH, LINK, "a peer did not answer", _PEER, _COUNTERS),
    Rule("port.rnr_nak_retry_err", GREW, 10, NETWORK, WATCH, LINK, "a peer was not ready", _PEER, _COUNTERS),
    Rule("port.packet_seq_err", GREW, 100, NETWORK, WATCH, LINK, "packets repeated for a peer", _PEER, _COUNTERS),
    Rule("port.out_of_sequence", GREW, 1000, NETWORK, WATCH, LINK, "packets out of order", _PEER, _COUNTERS),
    Rule("port.rx_icrc_encapsulated", GREW, 1, NETWORK, WATCH, LINK, "RoCE packets damaged", _PEER, _COUNTERS),
    Rule("port.roce_adp_retrans", GREW, 1000, NETWORK, WATCH, LINK, "RoCE packets repeated", _PEER, _COUNTERS),
    Rule("interface.up", FELL, 1, NETWORK, WATCH, LINK, "a network interface went down", _PORT_CABLE, _INTERFACE),
    Rule("interface.rate", FELL, 0.001, NETWORK, WATCH, LINK, "an interface became slower", _PORT_CABLE, _INTERFACE),
    Rule("interface.carrier_downs", GREW, 1, NETWORK, WATCH, LINK, "a link was lost", _PORT_CABLE, _INTERFACE),
    Rule("interface.rx_crc_errors", GREW, 10, NETWORK, WATCH, LINK, "damaged packets arrived", _PORT_CABLE, _INTERFACE),
    Rule("interface.rx_errors", GREW, 100, NETWORK, WATCH, LINK, "packets not received", _PORT_CABLE, _INTERFACE),
    Rule("interface.tx_errors", GREW, 100, NETWORK, WATCH, LINK, "packets not sent", _PORT_CABLE, _INTERFACE),
    Rule("log.nic.dead", HAPPENED, 1, NETWORK, EVICT, THIS, "the network adapter failed", _ADAPTER, _MLX5),
    Rule("log.nic.heat", HAPPENED, 1, NETWORK, WATCH, THIS, "the network adapter is hot", _HEAT, _MLX5),
    Rule("log.nic.power", HAPPENED, 1, HOST, WATCH, THIS, "the adapter's slot gives too little power", _SLOT, _MLX5),
    Rule("log.nic.cable", HAPPENED, 1, NETWORK, WATCH, LINK, "a cable or transceiver failed", _PORT_CABLE, _MLX5),
    Rule("log.nic.timeout", HAPPENED, 1, NETWORK, WATCH, THIS, "the adapter answered late", _ADAPTER, _MLX5),
    Rule("log.nic.down", HAPPENED, 1, NETWORK, WATCH, LINK, "a network link was lost", _PORT_CABLE, _MLX5),
)

_MAIN_MEMORY = (
    Rule("memory.uncorrected", GREW, 1, HOST, EVICT, THIS, "uncorrectable memory errors", _DIMM, _EDAC),
    Rule("memory.corrected", GREW, 100, HOST, WATCH, THIS, "many corrected memory errors", _DIMM, _EDAC),
    Rule("log.memory.uncorrected", HAPPENED, 1, HOST, EVICT, THIS, "an uncorrectable memory error", _DIMM, _EDAC),
    Rule("log.memory.corrected", HAPPENED, 100, HOST, WATCH, THIS, "many corrected memory errors", _DIMM, _EDAC),
    Rule("memory.corrupted", ROSE, 1, HOST, WATCH, THIS, "memory was taken out of use", _DIMM, _PROC),
    Rule("memory.available_share", AT_MOST, 0.02, SOFTWARE, WATCH, PROGRAM, "little memory left", _LESS_MEMORY, _PROC),
    Rule("memory.oom_kills", GREW, 1, SOFTWARE, WATCH, PROGRAM, "processes killed for memory", _LESS_MEMORY, _PROC),
    Rule("log.oom_kill", HAPPENED, 1, SOFTWARE, WATCH, PROGRAM, "a process killed for memory", _LESS_MEMORY, _PROC),
)

_MACHINE = (
    Rule(
        "log.machine_check.fatal", HAPPENED, 1, HOST, EVICT, THIS, "an uncorrected machine check", _DIAGNOSTICS, _EDAC
    ),
    Rule("log.machine_check", HAPPENED, 1, HOST, WATCH, THIS, "machine checks were logged", _DIAGNOSTICS, _EDAC),
    Rule("log.pcie.fatal", HAPPENED, 1, HOST, EVICT, THIS, "a fatal PCIe error", _DIAGNOSTICS, _PCIE),
    Rule("log.pcie.uncorrected", HAPPENED, 1, HOST, WATCH, THIS, "an uncorrected PCIe error", _DIAGNOSTICS, _PCIE),
    Rule("log.pcie.corrected", HAPPENED, 10, HOST, WATCH, THIS, "corrected PCIe errors", _DIAGNOSTICS, _PCIE),
    Rule("log.pcie.contained", HAPPENED, 1, HOST, WATCH, THIS, "a PCIe port was switched off", _DIAGNOSTICS, _DPC),
    Rule("log.pcie.limited", HAPPENED, 1, HOST, WATCH, THIS, "a PCIe link is slower than its device", _SLOT, _LIMITED),
    Rule("pcie.fatal", GREW, 1, HOST, EVICT, THIS, "fatal PCIe errors", _DIAGNOSTICS, _AER),
    Rule("pcie.uncorrected", GREW, 1, HOST, WATCH, THIS, "uncorrected PCIe errors", _DIAGNOSTICS, _AER),
    Rule("pcie.corrected", GREW, 100, HOST, WATCH, THIS, "corrected PCIe errors", _SLOT, _AER),
    Rule("pcie.lanes_lost", ROSE, 1, HOST, WATCH, THIS, "a PCIe link lost lanes", _SLOT, _LINK_WIDTH),
    Rule("log.lockup", HAPPENED, 1, HOST, WATCH, THIS, "a processor was blocked", _DIAGNOSTICS, _LOCKUP),
    Rule("log.hung_task", HAPPENED, 1, HOST, WATCH, PROGRAM, "a process waits for a device", _DISK, _LOCKUP),
    Rule("cpu.throttled", GREW, 1, HOST, WATCH, THIS, "heat slowed the processors down", _HEAT, _HOT),
    Rule("cpu.offline", ROSE, 1, HOST, WATCH, THIS, "processors went offline", _DIAGNOSTICS, _HOTPLUG),
)

_DISKS = (
    Rule("disk.live", FELL, 1, NETWORK, WATCH, THIS, "an NVMe disk does not work any more", _DISK, _NVME),
    Rule("log.disk.dead", HAPPENED, 1, NETWORK, EVICT, THIS, "an NVMe disk was given up", _DISK, _NVME),
    Rule("log.disk.reset", HAPPENED, 1, NETWORK, WATCH, THIS, "an NVMe disk was reset", _DISK, _NVME),
    Rule("log.disk.timeout", HAPPENED, 1, NETWORK, WATCH, THIS, "an NVMe disk answered late", _DISK, _NVME),
    Rule("log.disk.medium", HAPPENED, 1, NETWORK, WATCH, THIS, "a disk cannot read some of its data", _DISK, _BLOCK),
    Rule("log.disk.error", HAPPENED, 1, NETWORK, WATCH, THIS, "reading or writing a disk failed", _DISK, _BLOCK),
    Rule("disk.errors", GREW, 10, NETWORK, WATCH, THIS, "errors that a disk counts", _DISK, _BLOCK),
    Rule("log.file_system", HAPPENED, 1, NETWORK, EVICT, THIS, "a file system is damaged", _DISK, _BLOCK),
    # A folder of the run may be on storage that all nodes share.
    Rule("log.storage.waiting", HAPPENED, 1, NETWORK, WATCH, LINK, "a file server does not answer", _SERVER, _NFS),
    Rule("disk.read_only", AT_LEAST, 1, NETWORK, WATCH, LINK, "a folder cannot be written", _DISK, _PROC),
    Rule("disk.unreachable", AT_LEAST, 1, NETWORK, WATCH, LINK, "a folder cannot be reached", _DISK, _PROC),
    Rule("disk.free_share", AT_MOST, 0.01, SOFTWARE, WATCH, PROGRAM, "a disk is almost full", _ROOM, _PROC),
    Rule("disk.free_inodes_share", AT_MOST, 0.01, SOFTWARE, WATCH, PROGRAM, "too many files", _ROOM, _PROC),
    Rule("disk.temperature", AT_LEAST, 80, NETWORK, WATCH, THIS, "a disk is hot", _HEAT, _NVME),
)

_TIMES = (
    Rule("clock.ahead", MOVED, 0.5, HOST, WATCH, THIS, "the clock was set while the node ran", _TIME, _CLOCK),
    Rule("clock.error", AT_LEAST, 5, HOST, WATCH, THIS, "the clock may be wrong", _TIME, _CLOCK),
    Rule("clock.unsynchronized", ROSE, 1, HOST, WATCH, THIS, "the clock lost its time service", _TIME, _CLOCK),
    Rule("clock.slow_source", ROSE, 1, HOST, WATCH, THIS, "the kernel fell back to a slow clock", _DIAGNOSTICS, _CLOCK),
    Rule(
        "log.clock.unstable", HAPPENED, 1, HOST, WATCH, THIS, "the processors' clock is unstable", _DIAGNOSTICS, _CLOCK
    ),
)

NODE_RULES = (*_PORTS, *_MAIN_MEMORY, *_MACHINE, *_DISKS, *_TIMES)

RULES: tuple[Rule, ...] = GPU_RULES + NODE_RULES
"""All rules; of the rules for an observation, the first that fits it applies."""


@dataclass(frozen=True)
class Finding:
    """Something about a node that its operators should know; what a :class:`Rule` has, too, is that of its rule.

    Attributes:
        device: name of the device, "" for the node as a whole.
        when: wall time of the (last) observation in seconds since 1970.
    """

    node: str
    device: str
    observation: str
    category: str
    action: str
    cause: str
    reason: str
    advice: str
    source: str
    when: float

    @property
    def key(self) -> tuple[str, str]:
        """Return what is equal for findings of the same fault of the same device."""
        return self.device, self.observation

    @property
    def is_evidence(self) -> bool:
        """Return whether the finding speaks against its own device or node, and not only for watching it."""
        return self.action != WATCH


def rules(before: Reading | None, now: Reading, table: Sequence[Rule] = RULES) -> list[Finding]:
    """Return what two readings of a node reveal, the most severe findings first.

    Args:
        before: the earlier reading. None: growth cannot be judged, and all events of the later one count.
        table: the rules; the first that is about an observation applies to it.
    """
    found = [*_of_events(before, now, table), *_of_counters(before, now, table), *_of_values(before, now, table)]
    return sorted(found, key=lambda each: (-ACTIONS.index(each.action), each.device, each.observation))


def informed(guess: Verdict, findings: Iterable[Finding], device: str) -> Verdict:
    """Return the verdict on a failed worker in the light of what its own node has found.

    A finding with an action against the worker's device, or against the node as a whole, replaces the guess, unless the
    guess is already more severe than replacing the worker. No finding of another device counts, and no finding whose
    cause may be a peer's, so a verdict never becomes worse for what others have done.

    Args:
        findings: the findings of the worker's node since shortly before the failure.
        device: name of the worker's device, such as "gpu3"; "" if it has none.
    """
    able = [each for each in findings if each.is_evidence and each.cause == THIS and _concerns(each, device)]
    if not able or SEVERITY.index(guess.action) > SEVERITY.index(RESTART):
        return guess
    worst = max(able, key=lambda each: ACTIONS.index(each.action))
    reason = f"{worst.device or 'the node'}: {worst.reason}; it said: {guess.reason}"
    # A restart of all workers would hit the same device again: what a defect does to a program looks like a bug.
    action = REPLACE if guess.action in (RETRY, REPLACE, RESTART) else guess.action
    is_device = bool(device) and _is_part_of(worst.device, device)
    return replace(
        guess,
        category=worst.category,
        action=action,
        reason=reason,
        signal=worst.observation,
        node_suspect=not is_device,
        device_unusable=is_device,
        key=f"{worst.device} {worst.observation}",
    )


def _concerns(finding: Finding, device: str) -> bool:
    """Return whether a finding is about this device, or about a part of the node that all of its workers use."""
    return _is_part_of(finding.device, device) or not finding.device.startswith("gpu")


def _is_part_of(part: str, device: str) -> bool:
    return part == device or part.startswith(f"{device}/")


def _rule_for(observation: str, table: Sequence[Rule]) -> Rule | None:
    return next((rule for rule in table if rule.is_about(observation)), None)


def _finding(rule: Rule, observed: Observation, reason: str) -> Finding:
    said = f"{rule.meaning}{': ' if reason else ''}{reason}"
    place = (observed.node, observed.device, observed.name)
    return Finding(*place, rule.category, rule.action, rule.cause, said, rule.advice, rule.source, observed.when)


def _of_events(before: Reading | None, now: Reading, table: Sequence[Rule]) -> list[Finding]:
    known = set() if before is None else {(o.device, o.name, o.text) for o in before.observations if o.kind == EVENT}
    new: dict[tuple[str, str], list[Observation]] = defaultdict(list)
    for each in now.observations:
        if each.kind == EVENT and (each.device, each.name, each.text) not in known:
            new[each.device, each.name].append(each)
    found = []
    for (_, name), events in new.items():
        rule = _rule_for(name, table)
        if rule is not None and rule.condition == HAPPENED and len(events) >= rule.limit:
            times = f"{len(events)} times, the last: " if len(events) > 1 else ""
            found.append(_finding(rule, events[-1], times + events[-1].text))
    return found


def _of_counters(before: Reading | None, now: Reading, table: Sequence[Rule]) -> list[Finding]:
    found = []
    for change in differences(before, now):
        rule = _rule_for(change.now.name, table)
        if rule is not None and rule.condition == GREW and change.grew >= rule.limit:
            label = f" ({change.now.text})" if change.now.text else ""
            reason = f"{change.grew:g} in {change.seconds:.0f} s, {change.now.value:g} in all{label}"
            found.append(_finding(rule, change.now, reason))
    return found


def _of_values(before: Reading | None, now: Reading, table: Sequence[Rule]) -> list[Finding]:
    was = {} if before is None else {(o.device, o.name): o.value for o in before.observations if o.kind == GAUGE}
    found = []
    for each in now.observations:
        rule = None if each.kind in (EVENT, COUNTER) else _rule_for(each.name, table)
        if rule is not None and (reason := _holds(rule, each, was.get((each.device, each.name)))):
            found.append(_finding(rule, each, reason))
    return found


def _holds(rule: Rule, now: Observation, before: float | None) -> str:
    """Return the value that fulfils a rule's condition, in words, or ""."""
    rose = 0.0 if before is None else now.value - before
    holds = {
        AT_LEAST: now.value >= rule.limit,
        AT_MOST: now.value <= rule.limit,
        ROSE: rose >= rule.limit,
        FELL: -rose >= rule.limit,
        MOVED: abs(rose) >= rule.limit,
    }
    if not holds.get(rule.condition, False):
        return ""
    unit = f" {now.unit}" if now.unit else ""
    value = f"{rose:+.3g}{unit}" if rule.condition == MOVED else f"{now.value:.3g}{unit}"
    earlier = f" (it was {before:.3g}{unit})" if rule.condition in (ROSE, FELL) else ""
    return value + earlier + (f", {now.text}" if now.text else "")
