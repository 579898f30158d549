"""Models of how many completed steps a failure throws away (DEADPOOL, section IV): uniform and empirical."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class Replay(Protocol):
    """A model of R, the number of steps completed since the last checkpoint when a failure strikes."""

    def expected(self, interval: int) -> float:
        """Return E[R] with a checkpoint every ``interval`` steps."""

    def describe(self) -> str:
        """Return the model in a few words."""


@dataclass(frozen=True)
class Uniform:
    """Failures strike uniformly in time: R is uniform on 0 .. K-1, and E[R] = (K - 1) / 2."""

    def expected(self, interval: int) -> float:
        return (interval - 1) / 2

    def describe(self) -> str:
        return "uniform: a failure strikes at any time alike, E[R] = (K - 1) / 2"


@dataclass(frozen=True)
class Empirical:
    """Failures as recorded: E[R] = sum over r of r Pr(R = r).

    Attributes:
        steps: number of completed steps at which each failure struck, counted from any checkpoint. With a checkpoint
            every K steps, a failure at step s throws away s mod K steps.
    """

    steps: Sequence[int]

    def expected(self, interval: int) -> float:
        return sum(step % interval for step in self.steps) / len(self.steps)

    def describe(self) -> str:
        return f"empirical: {len(self.steps)} failures on record, E[R] = their mean of s mod K"
