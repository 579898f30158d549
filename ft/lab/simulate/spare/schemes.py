"""What keeps a run going when groups are lost: SPARe's controller, replicas, or nothing.

A scheme answers: how many stacks does a step compute, does the run survive this loss, must something be computed again.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from scipy import special

from ft.systems.spare.controller import Controller
from ft.systems.spare.placement import Placement


class Loss(NamedTuple):
    """What came of lost groups. ``wiped``: a type has no host left; ``patch``: a type of this step must be computed."""

    wiped: bool
    patch: bool


class Scheme(Protocol):
    """Of one run. ``stack``: stacks that a step computes; ``reorders``: a loss costs a call of the controller."""

    stack: int
    reorders: bool

    def lose(self, groups: Sequence[int]) -> Loss:
        """These groups are lost at once."""

    def reset(self) -> None:
        """All groups are back."""


class Spare:
    """SPARe, with the controller that the trainer has; ``accelerate`` as there."""

    reorders = True

    def __init__(self, placement: Placement, accelerate: bool | None = None):
        self._controller = Controller(placement, accelerate)
        self.reset = self._controller.reset

    @property
    def stack(self) -> int:
        return self._controller.stack

    def lose(self, groups: Sequence[int]) -> Loss:
        found = self._controller.lose(groups)
        return Loss(bool(found.wipe_out), bool(found.patch_types))


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
