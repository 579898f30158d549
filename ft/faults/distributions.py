"""Random distributions of the time, or of the number of steps, between two injected failures."""

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
    """Distribution of the time, or of the number of steps, between two failures.

    Attributes:
        family: "exponential" (memoryless) or "weibull" (``shape`` < 1: failures come in bursts; > 1: wear-out).
        scale: mean of the exponential or scale of the Weibull distribution, in seconds or steps.
        shape: shape of the Weibull distribution; 1 for the exponential one.
        in_steps: whether the scale is in steps instead of seconds.
    """

    family: str
    scale: float
    shape: float = 1.0
    in_steps: bool = False

    @property
    def mean(self) -> float:
        """Return the expected number of seconds, or of steps, between two failures."""
        return self.scale * math.gamma(1.0 + 1.0 / self.shape)

    def times(self, rng: random.Random) -> Iterator[float]:
        """Yield the times of failures since the start, in seconds or steps, without end."""
        at = 0.0
        while True:
            at += rng.weibullvariate(self.scale, self.shape)
            yield at


def parse_distribution(value: Any) -> Distribution:
    """Parse ``exponential(mean=60s)`` or ``weibull(shape=0.7,scale=90s)``; ``20steps`` instead of a time counts steps.

    Raises:
        ValueError: the text is not valid, or a number in it is out of range.
    """
    match = re.fullmatch(r"\s*(\w+)\s*\((.*)\)\s*", str(value))
    if match is None or match[1] not in _PARAMETERS:
        raise ValueError("there is no such distribution")
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
        raise ValueError("the number of steps is not between 0.1 and a billion")
    return Distribution(family, number, shape, in_steps=True)


def parse_duration(value: Any, least: float = 1e-3) -> float:
    """Return a duration in seconds: a text as :func:`ft.base.quantities.seconds` reads it, or a plain number of
    seconds.

    Raises:
        ValueError: it is not valid, or less than ``least`` seconds.
    """
    return seconds(value, least, bare=1.0)
