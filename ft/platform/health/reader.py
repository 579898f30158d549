"""Takes readings of a node: asks every source once, and collects what they observe and which of them cannot be read.

The sources besides GPUs and the kernel log are files of /sys and /proc: the clock, disks, memory, network ports, PCIe
links and processors. EDAC is the part of the kernel that counts the errors which memory controllers correct or detect.
"""

import contextlib
import ctypes
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ft.platform import numa
from ft.platform.health.gpus import FROM_NVML, Gpus, find_nvml
from ft.platform.health.kernel_log import KernelLog
from ft.platform.health.observation import (
    COUNTER,
    EVENT,
    HealthSource,
    Observation,
    Reading,
    folders,
    number,
    pci_address,
    text,
)

_UNSYNCHRONIZED = 0x40
_WORDS_BEFORE_STATUS = 5
_SLOW_SOURCES = ("hpet", "acpi_pm", "jiffies", "refined-jiffies")


def kernel_status() -> tuple[int, int] | None:
    """Return (status bits, largest error in microseconds) of the kernel's clock, as ``adjtimex`` reports them.

    Returns:
        None if the call is not permitted or not there.
    """
    try:
        # struct timex begins with: modes, offset, freq, maxerror, esterror, status; it has at most 208 bytes
        words = (ctypes.c_long * 32)()
        if ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.byref(words)) < 0:
            return None
        return int(words[_WORDS_BEFORE_STATUS]) & 0xFFFFFFFF, int(words[3])
    except (OSError, AttributeError):
        return None


def _read_clock(found: HealthSource, root: Path, status: Callable[[], tuple[int, int] | None], ahead: float) -> None:
    """Observe the clock.

    Args:
        status: function that returns what ``kernel_status`` does.
        ahead: wall time minus monotonic time of this host, in seconds; its change shows a step of the clock.
    """
    source = text(root / "sys/devices/system/clocksource/clocksource0/current_clocksource")
    if source is not None:
        found.add("", "clock.slow_source", int(source in _SLOW_SOURCES), text=source)
    answer = status()
    if answer is not None:
        bits, error_us = answer
        found.add("", "clock.unsynchronized", int(bool(bits & _UNSYNCHRONIZED)))
        if not bits & _UNSYNCHRONIZED:
            found.add("", "clock.error", error_us / 1e6, "s")
    else:
        found.unreadable = "adjtimex is not permitted, or the clock is not this node's"
    found.add("", "clock.ahead", ahead, "s")


def ahead_of_monotonic() -> float:
    """Return wall time minus monotonic time of this host, in seconds."""
    return time.time() - time.monotonic()


def _read_disks(found: HealthSource, root: Path, watched: Sequence[Path]) -> None:
    """Observe the disks, and the free space and writability of the watched folders."""
    for controller in folders(root / "sys/class/nvme"):
        state = text(controller / "state")
        if state is not None:
            found.add(controller.name, "disk.live", int(state == "live"), text=state)
        for sensor in folders(controller):
            if sensor.name.startswith("hwmon"):
                heat = number(sensor / "temp1_input")
                found.add(controller.name, "disk.temperature", None if heat is None else heat / 1000, "C")
        if address := pci_address(controller / "device"):
            found.aliases[address] = controller.name
    for disk in folders(root / "sys/block"):
        found.add(disk.name, "disk.errors", number(disk / "device/ioerr_cnt"), kind=COUNTER)
    for folder in watched:
        _read_folder(found, folder)
    if not found.observations:
        found.unreadable = "no disk reports a state or errors"


def _read_folder(found: HealthSource, folder: Path) -> None:
    try:
        disk = os.statvfs(folder)
    except OSError as error:
        found.add(str(folder), "disk.unreachable", 1, text=str(error))
        return
    if disk.f_blocks:
        found.add(str(folder), "disk.free", disk.f_bavail * disk.f_frsize, "bytes")
        found.add(str(folder), "disk.free_share", disk.f_bavail / disk.f_blocks)
    if disk.f_files:
        found.add(str(folder), "disk.free_inodes_share", disk.f_favail / disk.f_files)
    found.add(str(folder), "disk.read_only", int(bool(disk.f_flag & os.ST_RDONLY)))


_KIB = 1 << 10
_MEMORY_COUNTERS = {"ce_count": "memory.corrected", "ue_count": "memory.uncorrected"}
_OF_DIMMS = {"dimm_ce_count": "memory.corrected", "dimm_ue_count": "memory.uncorrected"}


def _read_memory(found: HealthSource, root: Path) -> None:
    controllers = [each for each in folders(root / "sys/devices/system/edac/mc") if each.name.startswith("mc")]
    for controller in controllers:
        for name, observation in _MEMORY_COUNTERS.items():
            found.add(controller.name, observation, number(controller / name), kind=COUNTER)
        for dimm in (each for each in folders(controller) if each.name.startswith("dimm")):
            label = text(dimm / "dimm_label") or ""
            for name, observation in _OF_DIMMS.items():
                found.add(f"{controller.name}/{dimm.name}", observation, number(dimm / name), "", COUNTER, label)
    if not controllers:
        found.unreadable = "EDAC is not there: a virtual machine, or its driver is not loaded"
    sizes = _table(root / "proc/meminfo")
    for name, observation in (("MemAvailable", "memory.available"), ("HardwareCorrupted", "memory.corrupted")):
        found.add("", observation, sizes[name] * _KIB if name in sizes else None, "bytes")
    if sizes.get("MemTotal") and "MemAvailable" in sizes:
        found.add("", "memory.available_share", sizes["MemAvailable"] / sizes["MemTotal"])
    found.add("", "memory.oom_kills", _table(root / "proc/vmstat").get("oom_kill"), kind=COUNTER)


def _table(path: Path) -> dict[str, float]:
    """Return name -> number of a file with lines "name number" or "name: number kB"."""
    words = (line.split() for line in (text(path) or "").splitlines())
    return {word[0].rstrip(":"): float(word[1]) for word in words if len(word) > 1 and word[1].isdecimal()}


_PORT_COUNTERS = (
    *("symbol_error", "link_downed", "link_error_recovery", "local_link_integrity_errors", "port_rcv_errors"),
    *("port_rcv_remote_physical_errors", "port_rcv_switch_relay_errors", "port_xmit_discards", "port_xmit_wait"),
    *("port_rcv_constraint_errors", "excessive_buffer_overrun_errors", "VL15_dropped"),
)
_HARDWARE_COUNTERS = (
    *("out_of_sequence", "packet_seq_err", "local_ack_timeout_err", "rnr_nak_retry_err", "implied_nak_seq_err"),
    *("rx_icrc_encapsulated", "out_of_buffer", "req_cqe_error", "resp_cqe_error", "req_remote_access_errors"),
    *("roce_adp_retrans", "roce_slow_restart", "np_cnp_sent", "rp_cnp_handled", "np_ecn_marked_roce_packets"),
)
_INTERFACE_COUNTERS = ("rx_errors", "tx_errors", "rx_crc_errors", "rx_dropped", "tx_dropped", "tx_carrier_errors")
_LINK_UP, _INFINIBAND_DOWN = "4", "3"


def _read_ports(found: HealthSource, root: Path) -> None:
    """Observe all network ports that are devices, not software."""
    for adapter in folders(root / "sys/class/infiniband"):
        for port in folders(adapter / "ports"):
            _read_port(found, f"{adapter.name}/{port.name}", port)
        if address := pci_address(adapter / "device"):
            found.aliases[address] = adapter.name
    for interface in folders(root / "sys/class/net"):
        if (interface / "device").exists():
            _read_interface(found, interface)
            if address := pci_address(interface / "device"):
                found.aliases.setdefault(address, interface.name)
    if not found.observations:
        found.unreadable = "there is no InfiniBand, RoCE or Ethernet device in /sys/class"


def _read_port(found: HealthSource, device: str, port: Path) -> None:
    state, physical = (text(port / name) or "" for name in ("state", "phys_state"))
    if state:
        found.add(device, "port.up", int(state.startswith(_LINK_UP)), text=state)
    if physical:  # a port whose administrator has disabled it is down on purpose
        found.add(device, "port.disabled", int(physical.startswith(_INFINIBAND_DOWN)), text=physical)
    speed = re.match(r"([\d.]+) Gb/sec", text(port / "rate") or "")
    found.add(device, "port.rate", float(speed[1]) if speed else None, "Gb/s")
    for name in _PORT_COUNTERS:
        found.add(device, f"port.{name}", number(port / "counters" / name), kind=COUNTER)
    for name in _HARDWARE_COUNTERS:
        found.add(device, f"port.{name}", number(port / "hw_counters" / name), kind=COUNTER)


def _read_interface(found: HealthSource, interface: Path) -> None:
    device, state = interface.name, text(interface / "operstate")
    if state in ("up", "down"):
        found.add(device, "interface.up", int(state == "up"))
    rate = number(interface / "speed") if state == "up" else None
    found.add(device, "interface.rate", rate / 1000 if rate and rate > 0 else None, "Gb/s")
    found.add(device, "interface.carrier_downs", number(interface / "carrier_down_count"), kind=COUNTER)
    for name in _INTERFACE_COUNTERS:
        found.add(device, f"interface.{name}", number(interface / "statistics" / name), kind=COUNTER)


_ERRORS = {"correctable": "pcie.corrected", "nonfatal": "pcie.uncorrected", "fatal": "pcie.fatal"}
"""End of a file's name -> name of the observation."""


def _read_pcie(found: HealthSource, root: Path, aliases: Mapping[str, str]) -> None:
    """Observe PCIe. ``aliases``: other names of devices, of which the PCI addresses count -> name of the device."""
    for address, device in aliases.items():
        folder = root / "sys/bus/pci/devices" / address
        for kind, name in _ERRORS.items():
            found.add(device, name, _total(text(folder / f"aer_dev_{kind}")), kind=COUNTER)
        width, most = (number(folder / f"{which}_link_width") for which in ("current", "max"))
        if width and most:
            found.add(device, "pcie.lanes_lost", most - width, text=f"{width:g} of {most:g} lanes")
    if not found.observations:
        found.unreadable = "/sys/bus/pci has no known device that counts errors"


def _total(counts: str | None) -> float | None:
    """Return the number of errors in a file that the kernel ends with their sum, such as "TOTAL_ERR_COR 3"; None if it
    does not."""
    words = (counts or "").split()
    is_sum = len(words) > 1 and words[-2].startswith("TOTAL_ERR") and words[-1].isdecimal()
    return float(words[-1]) if is_sum else None


def _read_processors(found: HealthSource, root: Path) -> None:
    """Observe how often heat has slowed the processors of a node down, and how many processors are offline."""
    base = root / "sys/devices/system/cpu"
    packages: dict[str, float] = {}
    for processor in (each for each in folders(base) if re.fullmatch(r"cpu\d+", each.name)):
        count = number(processor / "thermal_throttle/package_throttle_count")
        if count is not None:  # all processors of a package show the same count
            package = text(processor / "topology/physical_package_id") or "0"
            packages[package] = max(count, packages.get(package, 0.0))
    for package, count in sorted(packages.items()):
        found.add(f"package{package}", "cpu.throttled", count, kind=COUNTER)
    with contextlib.suppress(ValueError):
        present, online = (numa.listed(text(base / name) or "") for name in ("present", "online"))
        found.add("", "cpu.offline", len(present - online) if present and online else None)
    if not found.observations:
        found.unreadable = "/sys/devices/system/cpu cannot be read"


class Reader:
    """Takes readings of one node. Used by one thread, which may wait long for a driver that hangs.

    Args:
        root: root of the file tree that is read, normally "/".
        nvml: the module ``pynvml``, or None to ask no GPU.
        clock_status: function that returns what ``kernel_status`` does.

    Attributes:
        asking: name of the source that is being read, "" between readings; any thread may look at it.
    """

    def __init__(
        self,
        node: str,
        root: Path = Path("/"),
        nvml: Any = None,
        watched: Sequence[Path] = (),
        clock_status: Callable[[], tuple[int, int] | None] = kernel_status,
    ):
        self._node, self._root, self._watched, self._clock_status = node, root, tuple(watched), clock_status
        self._gpus = Gpus(nvml, root)
        self._log = KernelLog(root / "dev/kmsg")
        self._aliases: dict[str, str] = {}
        self.asking = ""

    def read(self) -> Reading:
        """Return what the node says of itself now. Events are those since the last reading."""
        root, ahead = self._root, ahead_of_monotonic()
        self._aliases = aliases = {}
        return self._collect(
            {
                "GPUs": self._gpus.read,
                "network ports": lambda found: _read_ports(found, root),
                "memory": lambda found: _read_memory(found, root),
                "disks": lambda found: _read_disks(found, root, self._watched),
                "clock": lambda found: _read_clock(found, root, self._clock_status, ahead),
                "processors": lambda found: _read_processors(found, root),
                # last, because they name devices as the other sources do
                "PCIe": lambda found: _read_pcie(found, root, aliases),
                "kernel log": lambda found: self._log.read(found, ahead, aliases),
            },
            aliases,
        )

    def news(self) -> Reading:
        """Return only the events since the last reading or the last call; a reading has to come first.

        This takes so little time that it can be done every second.
        """
        ahead, aliases = ahead_of_monotonic(), dict(self._aliases)
        sources = {"GPUs": self._gpus.news, "kernel log": lambda found: self._log.read(found, ahead, aliases)}
        return self._collect(sources, aliases)

    def _collect(self, sources: Mapping[str, Callable[[HealthSource], None]], aliases: dict[str, str]) -> Reading:
        observations: list[Observation] = []
        unreadable: dict[str, str] = {}
        when = time.time()
        for name, read in sources.items():
            self.asking = name
            found = HealthSource(self._node, when)
            try:
                read(found)
            except Exception as error:  # what one source answers unexpectedly must not hide the others
                found = HealthSource(self._node, when, unreadable=f"{type(error).__name__}: {error}")
            observations += found.observations
            aliases.update(found.aliases)
            if found.unreadable:
                unreadable[name] = found.unreadable
        self.asking = ""
        return Reading(self._node, when, tuple(_once(observations)), unreadable, aliases)

    def close(self) -> None:
        """Release the driver and the log."""
        self._gpus.close()
        self._log.close()


def of_this_node(node: str, root: Path | None = None, watched: Sequence[Path] = ()) -> Reader:
    """Return a reader of the node that this process runs on.

    Args:
        root: root of another file tree to read instead, in which case no GPU and no clock is asked; None: this node's
            own.
        watched: folders whose disks are observed.
    """
    if root is None:
        return Reader(node, nvml=find_nvml(), watched=watched)
    return Reader(node, root, None, watched, lambda: None)


def _once(observations: Sequence[Observation]) -> list[Observation]:
    """Return observations without the Xids of NVML that the kernel log reports, too, and in more words."""
    logged = {_xid(each) for each in observations if each.kind == EVENT and not each.text.startswith(FROM_NVML)}
    return [o for o in observations if not (o.text.startswith(FROM_NVML) and _xid(o) in logged)]


def _xid(event: Observation) -> tuple[str, str]:
    """Return the device and the name of an event without what the name says besides the number of the Xid."""
    return event.device, ".".join(event.name.split(".")[:2])
