"""How far failures are apart, in time or in steps."""

import math
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ft.base.quantities import seconds

_PARAMETERS = {"exponential": ("mean",), "weibull": ("shape", "scale")}


@dataclass(frozen=True)
class Distribution:
    """Of the time, or of the steps, between two failures.

    Attributes:
        family: "exponential" (failures without memory) or "weibull" (``shape`` < 1: they come in bursts, > 1: wear).
        scale: the exponential's mean or the Weibull's scale, seconds or steps. shape: the Weibull's, 1 otherwise.
        in_steps: the scale is in steps.
    """

    family: str
    scale: float
    shape: float = 1.0
    in_steps: bool = False

    @property
    def mean(self) -> float:
        """Expected seconds, or steps, between two failures."""
        return self.scale * math.gamma(1.0 + 1.0 / self.shape)

    def times(self, rng: random.Random) -> Iterator[float]:
        """Seconds, or steps, from the start at which failures happen, without end."""
        at = 0.0
        while True:
            at += rng.weibullvariate(self.scale, self.shape)
            yield at


def parse_distribution(value: Any) -> Distribution:
    """Reads ``exponential(mean=60s)`` or ``weibull(shape=0.7,scale=90s)``; ``20steps`` in place of a time: by steps.

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
    scale = given.get("mean", given.get("scale"))
    steps = re.fullmatch(r"(.*\d\.?)\s*steps?", scale)
    if steps is None:
        return Distribution(family, parse_duration(scale), shape)
    number = float(steps[1])
    if not 0.1 <= number <= 1e9:
        raise ValueError("not between 0.1 and a billion steps")
    return Distribution(family, number, shape, in_steps=True)


def parse_duration(value: Any, least: float = 1e-3) -> float:
    """A time in the description of a fault: as :func:`ft.base.quantities.seconds` reads it, or a plain number of
    seconds.

    Raises:
        ValueError: it is none, or less than ``least``.
    """
    return seconds(value, least, bare=1.0)
