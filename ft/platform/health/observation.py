"""Observations: single values that a node reports about itself, and how much its counters grew between two readings.

The readers of this package collect them from small files of /sys and /proc below a root, and from drivers.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

GAUGE, COUNTER, EVENT = "gauge", "counter", "event"
"""Kinds of observations: a present value, a count that only grows until it is reset, and something that happened."""


@dataclass(frozen=True)
class Observation:
    """One value that a node reports about itself.

    Attributes:
        device: name of the device, such as "gpu0", "mlx5_0/1" or "nvme0"; "" for the node as a whole.
        name: what was observed, such as "gpu.temperature".
        unit: "C", "W", "s", "bytes", or "" for counts and yes/no (1/0).
        when: wall time of the observation, or of the event, in seconds since 1970.
        kind: GAUGE, COUNTER or EVENT.
        text: for an event, the line in which it was reported, otherwise further explanation or "".
    """

    node: str
    device: str
    name: str
    value: float
    unit: str
    when: float
    kind: str = GAUGE
    text: str = ""


@dataclass(frozen=True)
class Reading:
    """All observations of one node at one moment.

    Attributes:
        when: wall time in seconds since 1970.
        observations: the observations, by source.
        unreadable: source -> why it cannot be read here.
        aliases: other names of devices, such as PCI addresses and the ids of GPUs -> name of the device.
    """

    node: str
    when: float
    observations: tuple[Observation, ...] = ()
    unreadable: Mapping[str, str] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)

    def id_of(self, device: str) -> str:
        """Return the unique id of a GPU ("GPU-5c2f..."), or "" if it is not known."""
        return next((alias for alias, name in self.aliases.items() if name == device and alias.startswith("GPU-")), "")


@dataclass(frozen=True)
class CounterGrowth:
    """The growth of one counter between two readings.

    Attributes:
        grew: how much the counter has grown; its whole value if it was reset in between, as by a new driver.
        seconds: time between the two readings.
    """

    now: Observation
    grew: float
    seconds: float


def differences(before: Reading | None, now: Reading) -> list[CounterGrowth]:
    """Return the growth of each counter that both readings have, in the order of the later one.

    Args:
        before: the earlier reading; None: there is none, and the list is empty.
    """
    if before is None:
        return []
    was = {(o.device, o.name): o for o in before.observations if o.kind == COUNTER}
    found = []
    for later in now.observations:
        earlier = was.get((later.device, later.name))
        if later.kind == COUNTER and earlier is not None:
            grew = later.value - earlier.value
            found.append(CounterGrowth(later, later.value if grew < 0 else grew, later.when - earlier.when))
    return found


_PCI = re.compile(r"[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.\d")


@dataclass
class HealthSource:
    """Collects the observations of one source.

    Attributes:
        when: wall time of the reading, in seconds since 1970.
        unreadable: why the source, or a part of it, cannot be read, or "".
        aliases: other names of devices -> name of the device.
    """

    node: str
    when: float
    observations: list[Observation] = field(default_factory=list)
    unreadable: str = ""
    aliases: dict[str, str] = field(default_factory=dict)

    def add(
        self, device: str, name: str, value: float | None, unit: str = "", kind: str = GAUGE, text: str = ""
    ) -> None:
        """Add an observation; nothing is added if ``value`` is None."""
        if value is not None:
            self.observations.append(Observation(self.node, device, name, value, unit, self.when, kind, text))


def text(path: Path) -> str | None:
    """Return the content of a file without surrounding white space, or None if it cannot be read."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return None


def number(path: Path) -> float | None:
    """Return the first number in a file, decimal or hexadecimal with 0x, or None if there is none."""
    words = (text(path) or "").split()
    try:
        return float(int(words[0], 0)) if words else None
    except ValueError:
        return None


def folders(path: Path) -> list[Path]:
    """Return the folders in a folder, sorted by name; an empty list if it cannot be read."""
    try:
        return sorted(each for each in path.iterdir() if each.is_dir())
    except OSError:
        return []


def pci_address(device: Path) -> str:
    """Return the PCI address that a link to a device in /sys points to, such as "0000:3b:00.0", or ""."""
    try:
        return as_pci_address(device.resolve(strict=True).name)
    except OSError:
        return ""


def as_pci_address(name: str) -> str:
    """Return the name of a file as a PCI address, or "" if it is none."""
    return pci_name(name) if _PCI.fullmatch(name) else ""


def pci_name(address: str) -> str:
    """Return a PCI address as the kernel writes it ("0000:3b:00.0"), whatever the case and length of its domain."""
    domain, _, rest = address.lower().partition(":")
    return f"{int(domain, 16):04x}:{rest}"
