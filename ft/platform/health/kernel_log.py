"""Reads the kernel log: reports of NVIDIA's driver (Xids), memory, PCIe, network adapters, disks and killed processes.

An Xid is an error report of NVIDIA's driver about a GPU, an SXid one about an NVSwitch. The log is ``/dev/kmsg``, or a
file in its place that holds lines of ``/dev/kmsg`` or of ``dmesg``.
"""

import contextlib
import os
import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ft.platform.health.files import Source
from ft.platform.health.observation import EVENT, Observation

_ADDRESS = r"(?P<address>[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}(?::[0-9a-fA-F]{2}(?:\.\d)?)?)"
_RECORD = 8192
_MOST_NEW = 1 << 22


@dataclass(frozen=True)
class Line:
    """A kind of line in the kernel log.

    Attributes:
        name: name of the observation; {code} stands for the number in the line.
        pattern: regular expression with the groups ``address`` (a PCI address), ``device`` and ``code``, as far as the
            line has them.
        begins: what the name of a device begins with if it is known by its PCI address only.
    """

    name: str
    pattern: str
    begins: str = "pci "


LINES = (
    Line("xid.{code}", rf"NVRM: Xid \((?:PCI:)?{_ADDRESS}\): (?P<code>\d+)"),
    Line("sxid.fatal", rf"nvidia-nvswitch\d+: SXid \(PCI:{_ADDRESS}\): (?P<code>\d+), Fatal", "nvswitch "),
    Line("sxid.other", rf"nvidia-nvswitch\d+: SXid \(PCI:{_ADDRESS}\): (?P<code>\d+)", "nvswitch "),
    Line("log.gpu.off_the_bus", rf"NVRM: GPU (?:at )?(?:PCI:)?{_ADDRESS}:? .*fallen off the bus"),
    Line("log.memory.uncorrected", r"EDAC (?P<device>MC\d+): (?P<code>\d+) UE "),
    Line("log.memory.corrected", r"EDAC (?P<device>MC\d+): (?P<code>\d+) CE "),
    Line("log.memory.uncorrected", r"Memory failure: 0x[0-9a-f]+: |Uncorrected hardware memory error"),
    Line("log.machine_check.fatal", r"\[Hardware Error\]: .*(?:Uncorrected|Deferred|fatal)"),
    Line("log.machine_check", r"mce: \[Hardware Error\]: (?:Machine check events logged|CPU \d+: Machine Check)"),
    Line("log.pcie.fatal", rf"{_ADDRESS}: (?:AER: |PCIe Bus Error: severity=)Uncorrect(?:ed|able) \((?:Fatal|FATAL)\)"),
    Line("log.pcie.uncorrected", rf"{_ADDRESS}: (?:AER: |PCIe Bus Error: severity=)Uncorrect(?:ed|able)"),
    Line("log.pcie.corrected", rf"{_ADDRESS}: (?:AER: (?:Multiple )?Corrected|PCIe Bus Error: severity=Corrected)"),
    Line("log.nic.dead", rf"mlx5_core {_ADDRESS}.*(?:health compromised|Fatal error|assert_var|PCI slot is unavail)"),
    Line("log.nic.heat", rf"mlx5_core {_ADDRESS}.*(?:[Hh]igh [Tt]emperature|Over temperature)"),
    Line("log.nic.cable", rf"mlx5_core {_ADDRESS}.*Port module event\[error\]"),
    Line("log.nic.timeout", rf"mlx5_core {_ADDRESS}.*(?:timeout|timed out)"),
    Line("log.nic.down", rf"mlx5_core {_ADDRESS}.*[Ll]ink [Dd]own"),
    Line("log.disk.dead", r"nvme (?P<device>nvme\d+): (?:Removing after probe failure|Device not ready|Disabling)"),
    Line("log.disk.reset", r"nvme (?P<device>nvme\d+): (?:controller is down|I/O .*reset controller|resetting contr)"),
    Line("log.disk.timeout", r"nvme (?P<device>nvme\d+): I/O .*timeout"),
    Line("log.disk.medium", r"critical (?:medium|target) error, dev (?P<device>\w+)"),
    Line("log.disk.error", r"(?:Buffer )?I/O error(?:,| on) dev (?P<device>\w+)"),
    Line("log.file_system", r"EXT4-fs error \(device (?P<device>[\w-]+)\)"),
    Line("log.file_system", r"XFS \((?P<device>[\w-]+)\): .*(?:[Cc]orruption|Shutting down)"),
    Line("log.file_system", r"[Rr]emounting filesystem read-only"),
    Line("log.oom_kill", r"(?:Out of memory|Memory cgroup out of memory): Killed process (?P<code>\d+)"),
    Line("log.soft_lockup", r"watchdog: BUG: soft lockup - CPU#(?P<code>\d+)"),
    Line("log.hung_task", r"INFO: task .* blocked for more than (?P<code>\d+) seconds"),
    Line("log.clock.unstable", r"[Mm]arking clocksource '?tsc'? as unstable"),
)
"""The lines that are looked for; the first that matches applies."""

_PATTERNS = [(line, re.compile(line.pattern)) for line in LINES]
# All other lines are most of a log, and one look rules them out.
_ANY = re.compile(
    "Xid|fallen off|EDAC|emory error|Memory failure|Hardware Error|AER|PCIe Bus|mlx5_core|nvme|error|XFS|read-only"
    "|ut of memory|lockup|blocked for|clocksource"
)


class KernelLog:
    """Reads the lines that were added to the kernel log since the last call. Used by one thread.

    Args:
        path: ``/dev/kmsg``, or a file with such lines or lines of ``dmesg``.
    """

    def __init__(self, path: Path):
        self._path = path
        self._file = -1
        self._rest = b""

    def read(self, node: str, when: float, ahead: float, aliases: Mapping[str, str]) -> Source:
        """Return the events that the new lines report; at the first call, those of all lines.

        Args:
            node: name of the node.
            when: wall time in seconds since 1970.
            ahead: wall time minus monotonic time of this host, in seconds.
            aliases: PCI address -> name of the device.
        """
        found = Source(node, when)
        try:
            if self._file < 0:
                self._file = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            for text in self._new():
                if event := parse(text, node, when, ahead, aliases):
                    found.observations.append(event)
        except OSError as error:
            self.close()
            found.unreadable = f"{self._path}: {error.strerror}"
            if isinstance(error, PermissionError):
                found.unreadable += " (it needs root, CAP_SYSLOG, or kernel.dmesg_restrict = 0)"
        return found

    def close(self) -> None:
        """Close the log; the next ``read`` begins with its first line again."""
        if self._file >= 0:
            with contextlib.suppress(OSError):
                os.close(self._file)
        self._file, self._rest = -1, b""

    def _new(self) -> Iterator[str]:
        if not stat.S_ISCHR(os.fstat(self._file).st_mode):
            *lines, self._rest = (self._rest + os.read(self._file, _MOST_NEW)).split(b"\n")
            yield from (line.decode(errors="replace") for line in lines)
            return
        for _ in range(_MOST_NEW // 64):
            try:
                record = os.read(self._file, _RECORD)
            except BlockingIOError:
                return
            except BrokenPipeError:  # the kernel has overwritten lines before they were read
                continue
            if not record:
                return
            yield record.partition(b"\n")[0].decode(errors="replace")


def parse(text: str, node: str, when: float, ahead: float, aliases: Mapping[str, str]) -> Observation | None:
    """Return the event that a line of the log reports, or None.

    Args:
        text: the line.
        node: name of the node.
        when: wall time that counts for a line without a time, in seconds since 1970.
        ahead: wall time minus monotonic time of this host, in seconds; the log has monotonic times.
        aliases: PCI address -> name of the device.
    """
    if not _ANY.search(text):
        return None
    for line, pattern in _PATTERNS:
        if match := pattern.search(text):
            groups = match.groupdict()
            code = groups.get("code") or ""
            stamp = _stamp(text)
            time = when if stamp is None else ahead + stamp
            name = line.name.format(code=code)
            return Observation(
                node, _device(groups, line, aliases), name, float(code or 1), "", time, EVENT, text.strip()
            )
    return None


def _stamp(text: str) -> float | None:
    """Return the seconds since the boot that a line begins with, or None."""
    if match := re.match(r"\d+,\d+,(\d+),[^;]*;", text):
        return int(match[1]) / 1e6
    match = re.search(r"\[\s*(\d+\.\d+)\]", text)
    return float(match[1]) if match else None


def _device(groups: Mapping[str, str | None], line: Line, aliases: Mapping[str, str]) -> str:
    address = (groups.get("address") or "").lower()
    if not address:
        return (groups.get("device") or "").lower()
    parts = address.split(":")
    whole = f"{parts[0][-4:]}:{':'.join(parts[1:])}"
    # Xids have no function number, and all functions of an adapter are one device here
    short = whole.partition(".")[0]
    return next((name for alias, name in aliases.items() if alias.partition(".")[0] == short), line.begins + whole)
