"""Reads the node's processors from /sys: how often heat has slowed them down, and how many are offline."""

import re
from pathlib import Path

from ft.platform.health.files import Source, folders, number, text
from ft.platform.health.observation import COUNTER


def read(root: Path, node: str, when: float) -> Source:
    """Return the observations of the processors. ``root``: root of the file tree; ``when``: wall time in seconds."""
    found = Source(node, when)
    base = root / "sys/devices/system/cpu"
    packages: dict[str, float] = {}
    for processor in (each for each in folders(base) if re.fullmatch(r"cpu\d+", each.name)):
        count = number(processor / "thermal_throttle/package_throttle_count")
        if count is not None:  # all processors of a package show the same count
            package = text(processor / "topology/physical_package_id") or "0"
            packages[package] = max(count, packages.get(package, 0.0))
    for package, count in sorted(packages.items()):
        found.add(f"package{package}", "cpu.throttled", count, kind=COUNTER)
    present, online = (_size(text(base / name)) for name in ("present", "online"))
    if present is not None and online is not None:
        found.add("", "cpu.offline", present - online)
    if not found.observations:
        found.unreadable = "/sys/devices/system/cpu cannot be read"
    return found


def _size(ranges: str | None) -> int | None:
    """Return how many numbers a list such as "0-3,8" holds, or None if it is none."""
    if ranges is None or not re.fullmatch(r"\d+(-\d+)?(,\d+(-\d+)?)*", ranges):
        return None
    bounds = (word.split("-") for word in ranges.split(","))
    return sum(int(bound[-1]) - int(bound[0]) + 1 for bound in bounds)
