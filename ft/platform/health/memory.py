"""Reads the node's memory from /sys and /proc: errors that EDAC counts, pages taken out of use, and free memory.

EDAC is the part of the kernel that counts the errors which memory controllers correct or detect.
"""

from pathlib import Path

from ft.platform.health.files import Source, folders, number, text
from ft.platform.health.observation import COUNTER

_KIB = 1 << 10
_COUNTERS = {"ce_count": "memory.corrected", "ue_count": "memory.uncorrected"}
_OF_DIMMS = {"dimm_ce_count": "memory.corrected", "dimm_ue_count": "memory.uncorrected"}


def read(root: Path, node: str, when: float) -> Source:
    """Return the observations of the node's memory. ``root``: root of the file tree; ``when``: wall time in seconds."""
    found = Source(node, when)
    controllers = [each for each in folders(root / "sys/devices/system/edac/mc") if each.name.startswith("mc")]
    for controller in controllers:
        for name, observation in _COUNTERS.items():
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
    return found


def _table(path: Path) -> dict[str, float]:
    """Return name -> number of a file with lines "name number" or "name: number kB"."""
    words = (line.split() for line in (text(path) or "").splitlines())
    return {word[0].rstrip(":"): float(word[1]) for word in words if len(word) > 1 and word[1].isdecimal()}
