"""Times between failures."""

import math
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

_UNITS = {"ms": 1e-3, "s": 1.0, "": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_PARAMETERS = {"exponential": ("mean",), "weibull": ("shape", "scale")}


@dataclass(frozen=True)
class Distribution:
    """Of the time between two failures.

    Attributes:
        family: "exponential" (failures without memory) or "weibull" (``shape`` < 1: they come in bursts, > 1: wear).
        scale: the exponential's mean or the Weibull's scale, seconds. shape: the Weibull's, 1 otherwise.
    """

    family: str
    scale: float
    shape: float = 1.0

    @property
    def mean(self) -> float:
        """Expected seconds between two failures."""
        return self.scale * math.gamma(1.0 + 1.0 / self.shape)

    def times(self, rng: random.Random) -> Iterator[float]:
        """Seconds from the start at which failures happen, without end."""
        at = 0.0
        while True:
            at += rng.weibullvariate(self.scale, self.shape)
            yield at


def parse_distribution(value: Any) -> Distribution:
    """Reads ``exponential(mean=60s)`` or ``weibull(shape=0.7,scale=90s)``.

    Raises:
        ValueError: it is neither.
    """
    match = re.fullmatch(r"\s*(\w+)\s*\((.*)\)\s*", str(value))
    if match is None or match[1] not in _PARAMETERS:
        raise ValueError("no such distribution")
    family, pairs = match[1], [part.partition("=") for part in match[2].split(",")]
    given = {name.strip(): text.strip() for name, _, text in pairs}
    expected = _PARAMETERS[family]
    if sorted(given) != sorted(expected) or len(pairs) != len(expected):
        raise ValueError(f"{family} takes {' and '.join(expected)}")
    shape = float(given.get("shape", 1.0))
    if not 0.1 <= shape <= 100.0:
        raise ValueError("shape is not between 0.1 and 100")
    return Distribution(family, parse_duration(given.get("mean", given.get("scale"))), shape)


def parse_duration(value: Any, least: float = 1e-3) -> float:
    """Seconds of "500ms", "90s", "2m", "1h", "1d" or a plain number of seconds.

    Raises:
        ValueError: it is none, or less than ``least``.
    """
    match = re.fullmatch(r"\s*(\d+\.?\d*(?:[eE][+-]?\d+)?|\.\d+)\s*(ms|s|min|m|h|d|)\s*", str(value))
    if match is None:
        raise ValueError("not a time")
    seconds = float(match[1]) * _UNITS[match[2]]
    if not least <= seconds < math.inf:
        raise ValueError(f"less than {least:g} s" if seconds < least else "for ever")
    return seconds
