"""Fault-tolerance schemes against lost groups: SPARe's controller, replication, or checkpoints alone.

A scheme determines how many stacks a step computes, whether the run survives a loss, and whether a patch compute is
needed.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from scipy import special

from ft.systems.spare.controller import Controller
from ft.systems.spare.placement import Placement


class Loss(NamedTuple):
    """The effect of losing groups.

    Attributes:
        wiped: a shard type has no host left, so a global restart is needed.
        patch: a shard type of this step must be computed again.
    """

    wiped: bool
    patch: bool


class Scheme(Protocol):
    """The state of a scheme in one run.

    Attributes:
        stack: number of stacks that a step computes.
        reorders: whether a loss costs a call of the controller.
    """

    stack: int
    reorders: bool

    def lose(self, groups: Sequence[int]) -> Loss:
        """Remove these groups, which are lost at once, and return the effect."""

    def reset(self) -> None:
        """Restore all groups, after a global restart."""


class Spare:
    """SPARe with the production controller, to which ``accelerate`` is passed."""

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
    """Blocks of ``degree`` groups that compute the same; the last block is shorter if ``degree`` does not divide N.

    Every group computes all shards of its block in each step, so a loss needs no patch compute. Degree 1 is training
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
    """Return the number of groups in each block of replication."""
    full, rest = divmod(groups, degree)
    return [degree] * full + [rest] * bool(rest)


def replication_endurance(groups: int, degree: int) -> float:
    """Return the exact expected number of random group failures until a block loses its last group, that failure
    included.

    With failure times uniform in 0..1, a block of size b survives until p with probability 1 - p^b. Integrating the
    product over all blocks weighs each number of failures equally, by 1 / (N + 1). The integral is a sum of beta
    functions.
    """
    full, rest = divmod(groups, degree)
    found = special.beta(1 / degree, full + 1)
    if rest:
        found -= special.beta((rest + 1) / degree, full + 1)
    return float((groups + 1) * found / degree)
