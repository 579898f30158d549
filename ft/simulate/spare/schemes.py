"""What keeps a run going when groups are lost: SPARe's layout, replicas, or nothing.

A scheme answers: how many stacks does a step compute, does the run survive this loss, must something be computed again.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from scipy import special

from ft.simulate.spare.layout import Loss, QuickLayout


class Scheme(Protocol):
    """Of one run. ``stack``: stacks that a step computes; ``reorders``: a loss costs a call of the controller."""

    stack: int
    reorders: bool

    def lose(self, groups: Sequence[int]) -> Loss:
        """These groups are lost at once."""

    def reset(self) -> None:
        """All groups are back."""


class Spare:
    """SPARe with the quick layout.

    Args:
        orders: type at each stack position of each group, int [N, r].
    """

    reorders = True

    def __init__(self, orders: np.ndarray):
        self._layout = QuickLayout(orders)
        self.lose, self.reset = self._layout.lose, self._layout.reset

    @property
    def stack(self) -> int:
        return self._layout.stack


class Replication:
    """Blocks of ``degree`` groups that compute the same; the last block is short where ``degree`` does not divide N.

    Every group computes all shards of its block in each step, so a loss costs no patch compute. Degree 1 is training
    with checkpoints alone.
    """

    reorders = False

    def __init__(self, groups: int, degree: int):
        self.stack = degree
        self._sizes = block_sizes(groups, degree)
        self.reset()

    def reset(self) -> None:
        self._left = list(self._sizes)

    def lose(self, groups: Sequence[int]) -> Loss:
        for group in groups:
            self._left[group // self.stack] -= 1
        return Loss(any(not self._left[group // self.stack] for group in groups), False)


def block_sizes(groups: int, degree: int) -> list[int]:
    """Of replication's blocks."""
    full, rest = divmod(groups, degree)
    return [degree] * full + [rest] * bool(rest)


def replication_endurance(groups: int, degree: int) -> float:
    """Expected failures of random groups up to and including the one that takes the last group of a block. Exact.

    With failure times uniform in 0..1 no block of size b is gone at p with probability 1 - p^b, and integrating the
    product over all blocks weighs each number of failures alike, by 1 / (N + 1). The integral is one of beta functions.
    """
    full, rest = divmod(groups, degree)
    found = special.beta(1 / degree, full + 1)
    if rest:
        found -= special.beta((rest + 1) / degree, full + 1)
    return float((groups + 1) * found / degree)
