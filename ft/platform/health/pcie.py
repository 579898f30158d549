"""Reads the PCIe links of network adapters, disks and GPUs from /sys: errors that the kernel counts, and lost lanes."""

from collections.abc import Mapping
from pathlib import Path

from ft.platform.health.files import Source, number, text
from ft.platform.health.observation import COUNTER

_ERRORS = {"correctable": "pcie.corrected", "nonfatal": "pcie.uncorrected", "fatal": "pcie.fatal"}
"""End of a file's name -> name of the observation."""


def read(root: Path, node: str, when: float, aliases: Mapping[str, str]) -> Source:
    """Return the observations of PCIe.

    Args:
        root: root of the file tree, normally "/".
        node: name of the node.
        when: wall time in seconds since 1970.
        aliases: other names of devices, of which the PCI addresses count -> name of the device.
    """
    found = Source(node, when)
    for address, device in aliases.items():
        folder = root / "sys/bus/pci/devices" / address
        for kind, name in _ERRORS.items():
            found.add(device, name, _total(text(folder / f"aer_dev_{kind}")), kind=COUNTER)
        width, most = (number(folder / f"{which}_link_width") for which in ("current", "max"))
        if width and most:
            found.add(device, "pcie.lanes_lost", most - width, text=f"{width:g} of {most:g} lanes")
    if not found.observations:
        found.unreadable = "/sys/bus/pci has no known device that counts errors"
    return found


def _total(counts: str | None) -> float | None:
    """Return the number of errors in a file that the kernel ends with their sum, such as "TOTAL_ERR_COR 3"; None if it
    does not."""
    words = (counts or "").split()
    is_sum = len(words) > 1 and words[-2].startswith("TOTAL_ERR") and words[-1].isdecimal()
    return float(words[-1]) if is_sum else None
