"""Parsers for quantities in flags and files: times, sizes, rates and numbers such as 250ms, 12h, 80GB, 98,304 and 70B.

Parsers raise ValueError with the reason. :func:`argument` turns a parser into a ``type`` for argparse that reports the
reason in its error message.
"""

import argparse
import math
import re
from collections.abc import Callable
from typing import Any, TypeVar

_NUMBER = r"(\d+\.?\d*(?:[eE][+-]?\d+)?|\.\d+)"
_TIMES = {"ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_SIZES = {"b": 1} | {
    f"{prefix}{ending}": base**power
    for power, prefix in enumerate("kmgt", 1)
    for ending, base in (("", 1000), ("b", 1000), ("ib", 1024))
}
_AMOUNTS = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
_LARGEST_IN_A_LIST = 10**6
TIMES = "give a time with a unit: ms, s, m (or min), h or d, such as 250ms, 30s, 2.5m, 12h, 90d"

Value = TypeVar("Value")


def seconds(value: Any, least: float = 1e-3, bare: float | None = None) -> float:
    """Parse a time, such as "500ms", "90s", "2m", "2min", "1h" or "1d", and return seconds. Zero needs no unit.

    Args:
        least: shortest time that is accepted, in seconds.
        bare: the unit of a number without one, in seconds; None: such a number is rejected.

    Raises:
        ValueError: the value is not a time, is too short, or has no unit.
    """
    text = str(value).strip()
    match = re.fullmatch(_NUMBER + r"\s*([a-z]*)", text)
    if isinstance(value, bool) or match is None or (match[2] and match[2] not in _TIMES):
        raise ValueError(f"not a time; {TIMES}")
    number = float(match[1])
    if not match[2] and bare is None and number:
        raise ValueError(f"this number has no unit; {TIMES}")
    found = number * (_TIMES[match[2]] if match[2] else bare or 1.0)
    if not least <= found < math.inf:
        raise ValueError(f"less than {least:g} s" if found < least else "too long for a number of seconds")
    return found


def size(value: Any, bare: float | None = 1.0) -> float:
    """Parse a size and return bytes: "80GB" and "80G" are 80e9, "80GiB" is 80 * 2**30.

    Args:
        bare: the unit of a number without one, in bytes; None: such a number is rejected.

    Raises:
        ValueError: the value is not a size, is not above zero, or has no unit.
    """
    match = re.fullmatch(_NUMBER + r"\s*([a-zA-Z]*)", str(value).strip())
    unit = match and (_SIZES.get(match[2].lower()) if match[2] else bare)
    found = float(match[1]) * unit if unit else 0.0
    if not 0 < found < math.inf:
        raise ValueError("not a size like 80GB or 512MiB" + ("" if bare else ": a size has a unit"))
    return found


def gigabytes_per_second(value: Any) -> float:
    """Parse a rate in GB/s, given with or without that unit.

    Raises:
        ValueError: the value is not a number above zero.
    """
    return positive(re.sub(r"\s*GB/s$", "", str(value), flags=re.IGNORECASE))


def positive(value: Any) -> float:
    """Parse a number above zero.

    Raises:
        ValueError: the value is not such a number.
    """
    return between(math.ulp(0.0), math.nextafter(math.inf, 0))(value, "not a number above 0")


def between(least: float, most: float) -> Callable[..., float]:
    """Return a parser for numbers from ``least`` to ``most``; its second argument replaces the error message."""

    def read(value: Any, otherwise: str = f"not a number from {least:g} to {most:g}") -> float:
        try:
            found = math.nan if isinstance(value, bool) else float(value)
        except (TypeError, ValueError):
            found = math.nan
        if not least <= found <= most:
            raise ValueError(otherwise)
        return found

    return read


def whole(least: int, most: int = 10**9) -> Callable[[Any], int]:
    """Return a parser for whole numbers from ``least`` to ``most``, with or without commas between thousands."""

    def read(value: Any) -> int:
        text = str(value).strip()
        digits = text.removeprefix("-")
        if not re.fullmatch(r"\d+|\d{1,3}(,\d{3})+", digits) or len(digits) > 30:
            raise ValueError("not a whole number")
        found = int(text.replace(",", ""))
        if not least <= found <= most:
            raise ValueError(f"not a whole number from {least:,} to {most:,}")
        return found

    return read


def amount(value: Any) -> float:
    """Parse a large number, such as a number of parameters: "350M", "70B".

    Raises:
        ValueError: the value is not a number above zero.
    """
    match = re.fullmatch(_NUMBER + r"([KMBT]?)", str(value).strip())
    found = float(match[1]) * _AMOUNTS[match[2]] if match else 0.0
    if not 0 < found < math.inf:
        raise ValueError("not a number such as 350M or 70B")
    return found


def argument(read: Callable[[Any], Value]) -> Callable[[str], Value]:
    """Wrap a parser as a ``type`` for argparse."""

    def read_argument(text: str) -> Value:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{text!r}: {error}") from error

    return read_argument


def duration(least: float = 1e-3, bare: float | None = None) -> Callable[[str], float]:
    """Return a ``type`` for argparse that parses times; see :func:`seconds`."""
    return argument(lambda text: seconds(text, least, bare))


def count(least: int = 1, most: int = 10**9) -> Callable[[str], int]:
    """Return a ``type`` for argparse that parses whole numbers."""
    return argument(whole(least, most))


def several(text: str) -> list[int]:
    """Parse several whole numbers, as a ``type`` for argparse: "8", "2..12", "200,600", "2..4,8".

    Raises:
        argparse.ArgumentTypeError: the text does not have this form, a range is empty, or a number exceeds a million.
    """
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(-?\d{1,9})\s*(?:\.\.\s*(-?\d{1,9})\s*)?", part)
        if match is None:
            raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor a range like 2..12")
        first = int(match[1])
        last = first if match[2] is None else int(match[2])
        if last < first:
            raise argparse.ArgumentTypeError(f"the range {part.strip()!r} is empty")
        if max(abs(first), abs(last)) > _LARGEST_IN_A_LIST:
            raise argparse.ArgumentTypeError(f"{part.strip()!r} goes beyond {_LARGEST_IN_A_LIST:,}")
        found += range(first, last + 1)
    return found
