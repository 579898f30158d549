"""Sizes of memory as people write them."""

import re

from ft.errors import UserError

UNITS = {"B": 1.0, "MB": 1e6, "GB": 1e9, "TB": 1e12, "MIB": 2.0**20, "GIB": 2.0**30, "TIB": 2.0**40}


def parse_bytes(text: str | float) -> float:
    """Bytes: "80GB", "79.6 GiB"; a number alone is bytes.

    Raises:
        UserError: it is no size.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?(?:e\d+)?)\s*([A-Za-z]*)\s*", str(text), re.IGNORECASE)
    unit = UNITS.get((match[2] or "B").upper()) if match else None
    if unit is None or float(match[1]) <= 0 or float(match[1]) * unit > 1e18:
        raise UserError(f"{text!r} is no size of memory", "write it like 80GB, 79.6GiB or 500MB")
    return float(match[1]) * unit


def gigabytes(size: float) -> str:
    """ "79.6 GB"."""
    return f"{size / 1e9:.1f} GB"
