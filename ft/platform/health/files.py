"""Reads small files of /sys and /proc below a root, and collects what one source reports."""

import re
from dataclasses import dataclass, field
from pathlib import Path

from ft.platform.health.observation import GAUGE, Observation

_PCI = re.compile(r"[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.\d")


@dataclass
class Source:
    """Collects the observations of one source.

    Attributes:
        node: name of the node.
        when: wall time of the reading, in seconds since 1970.
        observations: what was observed.
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
