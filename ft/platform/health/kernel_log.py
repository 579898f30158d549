"""Reads the kernel log: reports of NVIDIA's driver (Xids), memory, PCIe, network adapters, disks and killed processes.

An Xid is an error report of NVIDIA's driver about a GPU, an SXid one about an NVSwitch. The log is ``/dev/kmsg``, or a
file in its place that holds lines of ``/dev/kmsg`` or of ``dmesg``.
"""

import contextlib
import os
import re
import stat
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from ft.platform.health import gpus
from ft.platform.health.observation import EVENT, HealthSource, Observation, pci_name

_ADDRESS = r"(?P<address>[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}(?::[0-9a-fA-F]{2}(?:\.\d)?)?)"
_RECORD = 8192
_MOST_NEW = 1 << 22
_LONGEST = 1000
"""Characters of a line that are looked at and kept; the kernel's own lines are shorter."""


@dataclass(frozen=True)
class Line:
    """A kind of line in the kernel log.

    Attributes:
        name: name of the observation; {code} stands for the number in the line.
        pattern: regular expression with the groups ``address`` (a PCI address), ``driver``, ``device`` and ``code``, as
            far as the line has them.
        begins: what the name of a device begins with if it is known by its PCI address only.
    """

    name: str
    pattern: str
    begins: str = "pci "


# With MIG, the numbers of the instances follow the address.
_XID = rf"NVRM: Xid \((?:PCI:)?{_ADDRESS}(?: GPU-I:\d+)?(?: GPU-CI:\d+)?\): "
_SXID = rf"nvidia-nvswitch\d+: SXid \(PCI:{_ADDRESS}\): "
_ERROR = rf"(?P<driver>[\w.-]+) {_ADDRESS}: (?:AER: )?PCIe Bus Error: severity="


def _recovery(number: str) -> str:
    return rf"{_XID}(?P<code>154), .*recovery action changed from .* to 0x{number}\b"


LINES = (
    Line("gpu.recovered", _recovery("0"), "gpu "),  # nothing is asked for any more
    *(Line(f"xid.154.{name}", _recovery(f"{n:x}"), "gpu ") for n, name in enumerate(gpus.RECOVERY_ACTIONS) if n),
    Line(f"xid.154.{gpus.UNKNOWN_ACTION}", _recovery("[0-9a-f]+"), "gpu "),
    Line("xid.{code}.reset", rf"{_XID}(?P<code>94), .*\bRST: Yes", "gpu "),
    Line("xid.{code}.fatal", rf"{_XID}(?P<code>14[4-9]), .*\bFatal\s+XC\d", "gpu "),
    Line("xid.{code}", rf"{_XID}(?P<code>\d+)", "gpu "),
    Line("log.gpu.off_the_bus", rf"NVRM: (?:The NVIDIA )?GPU (?:at )?(?:PCI:)?{_ADDRESS}:? .*fallen off the", "gpu "),
    Line("log.gpu.init", rf"NVRM: GPU {_ADDRESS}: RmInitAdapter failed", "gpu "),
    # errors of the switch itself, and not of one of its links
    Line("sxid.switch", rf"{_SXID}(?P<code>10003|12020|22003|22011|230(?:0[1-9]|1[0-7])), Fatal", "nvswitch "),
    Line("sxid.switch", rf"{_SXID}(?P<code>10006|26006), (?!SOE HALT data)", "nvswitch "),
    Line("sxid.heat", rf"{_SXID}(?P<code>10004), ", "nvswitch "),
    Line("sxid.fatal", rf"{_SXID}(?P<code>\d+), Fatal", "nvswitch "),
    Line("sxid.corrected", rf"{_SXID}(?P<code>\d+), Correctable", "nvswitch "),
    # not the end of a heat event, a number that means nothing, or the further lines of a report
    Line("sxid.other", rf"{_SXID}(?!10005|22013)(?P<code>\d+), (?!Severity |Data \{{|SOE HALT data)", "nvswitch "),
    Line("log.memory.uncorrected", r"EDAC (?P<device>MC\d+): (?P<code>\d+) UE "),
    Line("log.memory.corrected", r"EDAC (?P<device>MC\d+): (?P<code>\d+) CE "),
    Line("log.memory.uncorrected", r"Memory failure: 0x[0-9a-f]+: |Uncorrected hardware memory error"),
    Line("log.machine_check.fatal", r"\[Hardware Error\]: .*(?:Uncorrected|severity: fatal|Fatal)"),
    Line("log.machine_check", r"\[Hardware Error\]: .*(?:Deferred|severity: recoverable)"),
    Line("log.machine_check", r"mce: \[Hardware Error\]: (?:Machine check events logged|CPU \d+: Machine Check)"),
    Line("log.pcie.fatal", rf"{_ERROR}Uncorrect(?:ed|able) \((?:Fatal|FATAL)\)"),
    Line("log.pcie.uncorrected", rf"{_ERROR}Uncorrect(?:ed|able)"),
    Line("log.pcie.corrected", rf"{_ERROR}Correct(?:ed|able)"),
    # what a root port tells of a device whose own line may follow
    Line("log.pcie.uncorrected", rf"AER: (?:Multiple )?Uncorrect\w+ \([\w-]+\) error (?:message )?\w+:? .*?{_ADDRESS}"),
    Line("log.pcie.contained", rf" {_ADDRESS}: DPC: containment event"),
    Line("log.pcie.limited", rf"(?P<driver>[\w.-]+) {_ADDRESS}: .*available PCIe bandwidth, limited by"),
    Line("log.nic.dead", rf"mlx5_core {_ADDRESS}.*(?:health compromised|Fatal error|assert_var|PCI slot is unavail)"),
    Line("log.nic.heat", rf"mlx5_core {_ADDRESS}.*(?:[Hh]igh [Tt]emperature|Over temperature)"),
    Line("log.nic.power", rf"mlx5_core {_ADDRESS}.*insufficient power on the PCIe slot"),
    Line("log.nic.cable", rf"mlx5_core {_ADDRESS}.*Port module event\[error\]"),
    Line("log.nic.timeout", rf"mlx5_core {_ADDRESS}.*(?:timeout|timed out)"),
    Line("log.nic.down", rf"mlx5_core {_ADDRESS}.*[Ll]ink [Dd]own"),
    Line("log.disk.dead", r"nvme (?P<device>nvme\d+): (?:Removing after probe failure|Device not ready|Disabling)"),
    Line("log.disk.reset", r"nvme (?P<device>nvme\d+): (?:controller is down|I/O .*reset controller|resetting contr)"),
    Line("log.disk.timeout", r"nvme (?P<device>nvme\d+): I/O .*timeout"),
    Line("log.disk.medium", r"critical (?:medium|target) error, dev (?P<device>\w+)"),
    Line("log.disk.error", r"(?:Buffer )?I/O error(?:,| on) dev (?P<device>[\w-]+)"),
    Line("log.disk.error", r"block (?P<device>nvme\w+): no available path|md/raid.*: Disk failure on (?P<part>\w+)"),
    Line("log.file_system", r"EXT4-fs error \(device (?P<device>[\w-]+)\)"),
    Line("log.file_system", r"EXT4-fs \((?P<device>[\w-]+)\): I/O error while writing superblock"),
    Line("log.file_system", r"XFS \((?P<device>[\w-]+)\): .*(?:[Cc]orruption|Shutting down|has been shut down)"),
    Line("log.file_system", r"(?:\((?P<device>[\w-]+)\): )?[Rr]emounting filesystem read-only"),
    Line("log.storage.waiting", r"nfs: server (?P<device>\S+) not responding"),
    Line("log.oom_kill", r"(?:Out of memory|Memory cgroup out of memory): Killed process (?P<code>\d+)"),
    Line("log.lockup", r"(?:BUG: soft lockup - CPU#|hard LOCKUP on cpu )(?P<code>\d+)"),
    Line("log.hung_task", r"INFO: task .* blocked for more than (?P<code>\d+) seconds"),
    Line("log.clock.unstable", r"[Mm]arking clocksource '?tsc'? as unstable"),
)
"""The lines that are looked for; the first that matches applies."""

_PATTERNS = [(line, re.compile(line.pattern)) for line in LINES]
# All other lines are most of a log, and one search rules them out.
_ANY = re.compile(
    "Xid|fallen off|RmInit|EDAC|emory error|Memory failure|Hardware Error|AER|PCIe|DPC|mlx5_core|nvme|error|XFS"
    "|read-only|nfs:|md/raid|ut of memory|ockup|LOCKUP|blocked for|clocksource"
)
_BEGINS = re.compile(r"NVRM: The NVIDIA GPU \S+\s*$")
_GOES_ON = re.compile(r"NVRM: (?:\(PCI ID|installed|fallen)")
_LINES_OF_ONE = 3


class KernelLog:
    """Reads the lines that were added to the kernel log since the last call. Used by one thread.

    Args:
        path: ``/dev/kmsg``, or a file with such lines or lines of ``dmesg``.
    """

    def __init__(self, path: Path):
        self._path = path
        self._file = -1
        self._rest = b""
        self._held: list[str] = []
        self._has_failed = False

    def read(self, found: HealthSource, ahead: float, aliases: Mapping[str, str]) -> None:
        """Observe the events that the new lines report; at the first call, those of all lines.

        A log that could not be read any more is read from its end on when it can be again: what is older was reported,
        or is not known to be new.

        Args:
            ahead: wall time minus monotonic time of this host, in seconds.
        """
        try:
            self._open()
            for text in self._whole(self._new()):
                if event := parse(text, found.node, found.when, ahead, aliases):
                    found.observations.append(event)
        except OSError as error:
            self._has_failed = self._file >= 0 or self._has_failed
            self.close()
            found.unreadable = f"{self._path}: {error.strerror}"
            if isinstance(error, PermissionError):
                found.unreadable += " (it needs root, CAP_SYSLOG, or kernel.dmesg_restrict = 0)"

    def close(self) -> None:
        """Close the log."""
        if self._file >= 0:
            with contextlib.suppress(OSError):
                os.close(self._file)
        self._file, self._rest, self._held = -1, b"", []

    def _open(self) -> None:
        if self._file < 0:
            self._file = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            if self._has_failed:
                os.lseek(self._file, 0, os.SEEK_END)

    def _new(self) -> Iterator[str]:
        if not stat.S_ISCHR(os.fstat(self._file).st_mode):
            while data := os.read(self._file, _MOST_NEW):
                *lines, self._rest = (self._rest + data).split(b"\n")
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

    def _whole(self, lines: Iterable[str]) -> Iterator[str]:
        """Return lines, those that the driver prints as one message joined; ``/dev/kmsg`` has them as one record."""
        for text in lines:
            line = text.replace(r"\x0a", " ")
            if _BEGINS.search(line):
                self._held = [line]
            elif self._held and (more := _GOES_ON.search(line)):
                self._held.append(line[more.start() :])
                if len(self._held) == _LINES_OF_ONE:
                    yield " ".join(self._held)
                    self._held = []
            else:
                yield line


def parse(text: str, node: str, when: float, ahead: float, aliases: Mapping[str, str]) -> Observation | None:
    """Return the event that a line of the log reports, or None.

    Args:
        when: wall time that counts for a line without a time, in seconds since 1970.
        ahead: wall time minus monotonic time of this host, in seconds; the log has monotonic times.
        aliases: PCI address -> name of the device.
    """
    text = text[:_LONGEST]
    if not _ANY.search(text):
        return None
    for line, pattern in _PATTERNS:
        if match := pattern.search(text):
            groups = match.groupdict()
            code = groups.get("code") or ""
            stamp = _time(text, ahead)
            name = line.name.format(code=code)
            device, time_ = _device(groups, line, aliases), when if stamp is None else stamp
            return Observation(node, device, name, float(code or 1), "", time_, EVENT, text.strip())
    return None


def _time(text: str, ahead: float) -> float | None:
    """Return the wall time that a line begins with, in seconds since 1970, or None."""
    if match := re.match(r"\d+,\d+,(\d+),[^;]*;", text):
        return ahead + int(match[1]) / 1e6
    if match := re.match(r"(?:<\d+>|.*kernel: )?\[ *(\d+\.\d+)\]", text):
        return ahead + float(match[1])
    with contextlib.suppress(ValueError, OverflowError):
        if match := re.match(r"\[(\w{3} \w{3} +\d+ [\d:]{8} \d{4})\]", text):  # dmesg --ctime
            return time.mktime(time.strptime(match[1], "%a %b %d %H:%M:%S %Y"))
        if match := re.match(r"\d{4}-\d\d-\d\dT\S+", text):  # dmesg --time-format iso
            return datetime.fromisoformat(match[0]).timestamp()
    return None


def _device(groups: Mapping[str, str | None], line: Line, aliases: Mapping[str, str]) -> str:
    address = groups.get("address")
    if not address:
        return (groups.get("device") or groups.get("part") or "").lower()
    whole = pci_name(address)
    # Xids have no function number, and all functions of an adapter are one device here
    short = whole.partition(".")[0]
    begins = "gpu " if groups.get("driver") == "nvidia" else line.begins
    return next((name for alias, name in aliases.items() if alias.partition(".")[0] == short), begins + whole)
