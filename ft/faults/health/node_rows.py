"""The rules for all of a node but its GPUs: network ports, memory, PCIe, disks, clock and processors."""

from ft.faults.health.rule import (
    AT_LEAST,
    AT_MOST,
    EVICT,
    FELL,
    GREW,
    HAPPENED,
    LINK,
    MOVED,
    PROGRAM,
    ROSE,
    THIS,
    WATCH,
    Rule,
)
from ft.faults.verdict import HOST, NETWORK, SOFTWARE

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

_CABLE = "Check cable and transceiver, and compare with the switch port at the other end."
_PEER = (
    "Compare with the node at the other end and with the switches between: a counter does not say whose fault it is."
)
_ADAPTER = "Reset the network adapter or reboot the node before it is used again; update the adapter's firmware."
_SLOT = "Check the slot, its riser and its power, and what the firmware has set for it."
_DIMM = "Find the memory module (EDAC names it) and have it replaced."
_REBOOT = "Drain the node and run hardware diagnostics."
_MEMORY = "Give the job less host memory per node (snapshots, data loaders), or find what else runs there."
_DISK = "Check the disk with its own diagnostics, and have it replaced if the errors go on."
_SERVER = "Check the file server and the network to it: all nodes that use it wait as well."
_ROOM = "Make room on this disk, or choose another folder."
_TIME = "Check the time service (chrony, ntpd) of the node."
_HEAT = "Check fans and the temperature of the room; a slow node holds up all others."


def _row(name: str, condition: str, limit: float, category: str, action: str, cause: str, *words: str) -> Rule:
    meaning, advice, source = words
    return Rule(name, condition, limit, category, action, cause, meaning, advice, source)


_PORTS = (
    _row("port.up", FELL, 1, NETWORK, WATCH, LINK, "a network port went down", _CABLE, _INFINIBAND),
    _row("port.rate", FELL, 1, NETWORK, WATCH, LINK, "a network port became slower", _CABLE, _INFINIBAND),
    _row("port.link_downed", GREW, 1, NETWORK, WATCH, LINK, "a network link was lost", _CABLE, _INFINIBAND),
    _row("port.link_error_recovery", GREW, 1, NETWORK, WATCH, LINK, "a link was trained again", _CABLE, _INFINIBAND),
    _row("port.symbol_error", GREW, 10, NETWORK, WATCH, LINK, "symbol errors of a link", _CABLE, _INFINIBAND),
    _row("port.local_link_integrity_errors", GREW, 1, NETWORK, WATCH, LINK, "link errors", _CABLE, _INFINIBAND),
    _row("port.port_rcv_errors", GREW, 10, NETWORK, WATCH, LINK, "damaged packets arrived", _CABLE, _INFINIBAND),
    _row("port.port_rcv_remote_physical_errors", GREW, 10, NETWORK, WATCH, LINK, "bad packets", _PEER, _INFINIBAND),
    _row("port.excessive_buffer_overrun_errors", GREW, 1, NETWORK, WATCH, LINK, "overruns", _PEER, _INFINIBAND),
    _row("port.port_xmit_discards", GREW, 100, NETWORK, WATCH, LINK, "packets not sent", _PEER, _INFINIBAND),
    _row("port.local_ack_timeout_err", GREW, 10, NETWORK, WATCH, LINK, "a peer did not answer", _PEER, _COUNTERS),
    _row("port.rnr_nak_retry_err", GREW, 10, NETWORK, WATCH, LINK, "a peer was not ready", _PEER, _COUNTERS),
    _row("port.packet_seq_err", GREW, 100, NETWORK, WATCH, LINK, "packets repeated for a peer", _PEER, _COUNTERS),
    _row("port.out_of_sequence", GREW, 1000, NETWORK, WATCH, LINK, "packets out of order", _PEER, _COUNTERS),
    _row("port.rx_icrc_encapsulated", GREW, 1, NETWORK, WATCH, LINK, "RoCE packets damaged", _PEER, _COUNTERS),
    _row("port.roce_adp_retrans", GREW, 1000, NETWORK, WATCH, LINK, "RoCE packets repeated", _PEER, _COUNTERS),
    _row("interface.up", FELL, 1, NETWORK, WATCH, LINK, "a network interface went down", _CABLE, _INTERFACE),
    _row("interface.rate", FELL, 0.001, NETWORK, WATCH, LINK, "an interface became slower", _CABLE, _INTERFACE),
    _row("interface.carrier_downs", GREW, 1, NETWORK, WATCH, LINK, "a link was lost", _CABLE, _INTERFACE),
    _row("interface.rx_crc_errors", GREW, 10, NETWORK, WATCH, LINK, "damaged packets arrived", _CABLE, _INTERFACE),
    _row("interface.rx_errors", GREW, 100, NETWORK, WATCH, LINK, "packets not received", _CABLE, _INTERFACE),
    _row("interface.tx_errors", GREW, 100, NETWORK, WATCH, LINK, "packets not sent", _CABLE, _INTERFACE),
    _row("log.nic.dead", HAPPENED, 1, NETWORK, EVICT, THIS, "the network adapter failed", _ADAPTER, _MLX5),
    _row("log.nic.heat", HAPPENED, 1, NETWORK, WATCH, THIS, "the network adapter is hot", _HEAT, _MLX5),
    _row("log.nic.power", HAPPENED, 1, HOST, WATCH, THIS, "the adapter's slot gives too little power", _SLOT, _MLX5),
    _row("log.nic.cable", HAPPENED, 1, NETWORK, WATCH, LINK, "a cable or transceiver failed", _CABLE, _MLX5),
    _row("log.nic.timeout", HAPPENED, 1, NETWORK, WATCH, THIS, "the adapter answered late", _ADAPTER, _MLX5),
    _row("log.nic.down", HAPPENED, 1, NETWORK, WATCH, LINK, "a network link was lost", _CABLE, _MLX5),
)

_MAIN_MEMORY = (
    _row("memory.uncorrected", GREW, 1, HOST, EVICT, THIS, "uncorrectable memory errors", _DIMM, _EDAC),
    _row("memory.corrected", GREW, 100, HOST, WATCH, THIS, "many corrected memory errors", _DIMM, _EDAC),
    _row("log.memory.uncorrected", HAPPENED, 1, HOST, EVICT, THIS, "an uncorrectable memory error", _DIMM, _EDAC),
    _row("log.memory.corrected", HAPPENED, 100, HOST, WATCH, THIS, "many corrected memory errors", _DIMM, _EDAC),
    _row("memory.corrupted", ROSE, 1, HOST, WATCH, THIS, "memory was taken out of use", _DIMM, _PROC),
    _row("memory.available_share", AT_MOST, 0.02, SOFTWARE, WATCH, PROGRAM, "little memory left", _MEMORY, _PROC),
    _row("memory.oom_kills", GREW, 1, SOFTWARE, WATCH, PROGRAM, "processes killed for memory", _MEMORY, _PROC),
    _row("log.oom_kill", HAPPENED, 1, SOFTWARE, WATCH, PROGRAM, "a process killed for memory", _MEMORY, _PROC),
)

_MACHINE = (
    _row("log.machine_check.fatal", HAPPENED, 1, HOST, EVICT, THIS, "an uncorrected machine check", _REBOOT, _EDAC),
    _row("log.machine_check", HAPPENED, 1, HOST, WATCH, THIS, "machine checks were logged", _REBOOT, _EDAC),
    _row("log.pcie.fatal", HAPPENED, 1, HOST, EVICT, THIS, "a fatal PCIe error", _REBOOT, _PCIE),
    _row("log.pcie.uncorrected", HAPPENED, 1, HOST, WATCH, THIS, "an uncorrected PCIe error", _REBOOT, _PCIE),
    _row("log.pcie.corrected", HAPPENED, 10, HOST, WATCH, THIS, "corrected PCIe errors", _REBOOT, _PCIE),
    _row("log.pcie.contained", HAPPENED, 1, HOST, WATCH, THIS, "a PCIe port was switched off", _REBOOT, _DPC),
    _row("log.pcie.limited", HAPPENED, 1, HOST, WATCH, THIS, "a PCIe link is slower than its device", _SLOT, _LIMITED),
    _row("pcie.fatal", GREW, 1, HOST, EVICT, THIS, "fatal PCIe errors", _REBOOT, _AER),
    _row("pcie.uncorrected", GREW, 1, HOST, WATCH, THIS, "uncorrected PCIe errors", _REBOOT, _AER),
    _row("pcie.corrected", GREW, 100, HOST, WATCH, THIS, "corrected PCIe errors", _SLOT, _AER),
    _row("pcie.lanes_lost", ROSE, 1, HOST, WATCH, THIS, "a PCIe link lost lanes", _SLOT, _LINK_WIDTH),
    _row("log.lockup", HAPPENED, 1, HOST, WATCH, THIS, "a processor was blocked", _REBOOT, _LOCKUP),
    _row("log.hung_task", HAPPENED, 1, HOST, WATCH, PROGRAM, "a process waits for a device", _DISK, _LOCKUP),
    _row("cpu.throttled", GREW, 1, HOST, WATCH, THIS, "heat slowed the processors down", _HEAT, _HOT),
    _row("cpu.offline", ROSE, 1, HOST, WATCH, THIS, "processors went offline", _REBOOT, _HOTPLUG),
)

_DISKS = (
    _row("disk.live", FELL, 1, NETWORK, WATCH, THIS, "an NVMe disk does not work any more", _DISK, _NVME),
    _row("log.disk.dead", HAPPENED, 1, NETWORK, EVICT, THIS, "an NVMe disk was given up", _DISK, _NVME),
    _row("log.disk.reset", HAPPENED, 1, NETWORK, WATCH, THIS, "an NVMe disk was reset", _DISK, _NVME),
    _row("log.disk.timeout", HAPPENED, 1, NETWORK, WATCH, THIS, "an NVMe disk answered late", _DISK, _NVME),
    _row("log.disk.medium", HAPPENED, 1, NETWORK, WATCH, THIS, "a disk cannot read some of its data", _DISK, _BLOCK),
    _row("log.disk.error", HAPPENED, 1, NETWORK, WATCH, THIS, "reading or writing a disk failed", _DISK, _BLOCK),
    _row("disk.errors", GREW, 10, NETWORK, WATCH, THIS, "errors that a disk counts", _DISK, _BLOCK),
    _row("log.file_system", HAPPENED, 1, NETWORK, EVICT, THIS, "a file system is damaged", _DISK, _BLOCK),
    # A folder of the run may be on storage that all nodes share.
    _row("log.storage.waiting", HAPPENED, 1, NETWORK, WATCH, LINK, "a file server does not answer", _SERVER, _NFS),
    _row("disk.read_only", AT_LEAST, 1, NETWORK, WATCH, LINK, "a folder cannot be written", _DISK, _PROC),
    _row("disk.unreachable", AT_LEAST, 1, NETWORK, WATCH, LINK, "a folder cannot be reached", _DISK, _PROC),
    _row("disk.free_share", AT_MOST, 0.01, SOFTWARE, WATCH, PROGRAM, "a disk is almost full", _ROOM, _PROC),
    _row("disk.free_inodes_share", AT_MOST, 0.01, SOFTWARE, WATCH, PROGRAM, "too many files", _ROOM, _PROC),
    _row("disk.temperature", AT_LEAST, 80, NETWORK, WATCH, THIS, "a disk is hot", _HEAT, _NVME),
)

_TIMES = (
    _row("clock.ahead", MOVED, 0.5, HOST, WATCH, THIS, "the clock was set while the node ran", _TIME, _CLOCK),
    _row("clock.error", AT_LEAST, 5, HOST, WATCH, THIS, "the clock may be wrong", _TIME, _CLOCK),
    _row("clock.unsynchronized", ROSE, 1, HOST, WATCH, THIS, "the clock lost its time service", _TIME, _CLOCK),
    _row("clock.slow_source", ROSE, 1, HOST, WATCH, THIS, "the kernel fell back to a slow clock", _REBOOT, _CLOCK),
    _row("log.clock.unstable", HAPPENED, 1, HOST, WATCH, THIS, "the processors' clock is unstable", _REBOOT, _CLOCK),
)

NODE_RULES = (*_PORTS, *_MAIN_MEMORY, *_MACHINE, *_DISKS, *_TIMES)
