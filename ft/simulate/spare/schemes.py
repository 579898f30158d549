"""What keeps a run going when groups are lost: SPARe's layout, replicas, or nothing.

A scheme answers: how many stacks does a step compute, does the run survive this loss, must something be computed again.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

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
    """Expected failures up to and including the one that takes the last group of a block.

    Blocks are taken as independent: the probability that none is gone after k failures is the product over blocks of
    1 - C(N - b, k - b) / C(N, k), b being the block's size. Exact for degree 1.
    """
    failures = np.arange(groups)
    survive = np.ones(groups)
    for size, number in zip(*np.unique(block_sizes(groups, degree), return_counts=True), strict=True):
        gone = np.prod([np.clip(failures - i, 0, None) / (groups - i) for i in range(size)], axis=0)
        survive *= (1.0 - gone) ** number
    return float(survive.sum())
