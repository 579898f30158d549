"""Models of how many completed steps a failure discards, for ``ft plan disruption``: uniform and empirical.

After a failure, a run restarts from its last checkpoint, of which there is one every K steps, and computes R steps
again. The notation is that of DEADPOOL, section IV.
"""

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
    """Model of failures that strike uniformly in time: R is uniform on 0 .. K-1, and E[R] = (K - 1) / 2."""

    def expected(self, interval: int) -> float:
        return (interval - 1) / 2

    def describe(self) -> str:
        return "uniform: a failure is equally probable at any time, E[R] = (K - 1) / 2"


@dataclass(frozen=True)
class Empirical:
    """Model from recorded failures: E[R] = sum over r of r Pr(R = r).

    Attributes:
        steps: number of completed steps at which each failure struck, counted from any checkpoint. With a checkpoint
            every K steps, a failure at step s discards s mod K steps.
    """

    steps: Sequence[int]

    def expected(self, interval: int) -> float:
        return sum(step % interval for step in self.steps) / len(self.steps)

    def describe(self) -> str:
        return f"empirical: {len(self.steps)} recorded failures, E[R] = their mean of s mod K"
