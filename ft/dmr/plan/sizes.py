"""Sizes as people write them: 80GB, 512MiB, 1.5e9."""

import argparse
import math
import re

_UNITS = {"": 1, "b": 1} | {
    f"{prefix}{ending}": base**power
    for power, prefix in enumerate("kmgt", 1)
    for ending, base in (("", 1000), ("b", 1000), ("ib", 1024))
}


def size(text: str) -> float:
    """Bytes: "80GB" and "80G" are 80e9, "80GiB" is 80 * 2**30.

    Raises:
        argparse.ArgumentTypeError: it is no size, or none above zero.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?(?:[eE][+-]?\d+)?)\s*([a-zA-Z]*)\s*", text)
    unit = match and _UNITS.get(match[2].lower())
    if not unit or not math.isfinite(float(match[1])) or not float(match[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is no size like 80GB or 512MiB")
    return float(match[1]) * unit


def gigabytes(value: float) -> str:
    """ "61.3 GB", "12.4 MB", "310 B"."""
    for unit, least in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= least:
            return f"{value / least:.1f} {unit}"
    return f"{value:.0f} B"
