"""Fault-tolerance schemes in the simulation of SPARe: SPARe itself, replication, or checkpoints alone.

A group is one data-parallel rank, which fails as a whole. The batch of a step is divided into shards of different
types; in a stack, every group computes one of its shards. A scheme determines how many stacks a step computes,
whether training goes on after a loss of groups, and whether gradients of the current step have to be computed again
(patch compute).
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from scipy import special

from ft.systems.spare.controller import Controller
from ft.systems.spare.placement import Placement
from ft.systems.spare.shares import patches, rearrange


class Loss(NamedTuple):
    """The effect of losing groups.

    Attributes:
        wiped: True if a shard type has no group left that holds it, so that all groups restart from the checkpoint.
        patch: number of stacks that groups compute in addition, because no group that is left has computed a shard type
            of this step.
    """

    wiped: bool
    patch: int


class Scheme(Protocol):
    """The state of a scheme in one run.

    Attributes:
        stack: number of stacks that a step computes.
        reorders: whether a loss costs a call of SPARe's controller, which reorders the shards of the groups.
    """

    stack: int
    reorders: bool

    def lose(self, groups: Sequence[int]) -> Loss:
        """Remove groups that are lost at the same time during a step, and return the effect."""

    def committed(self) -> None:
        """End a step: the groups that were lost in it are left out of the next ones."""

    def reset(self) -> None:
        """Restore all groups, after a global restart."""


class Spare:
    """SPARe with the production controller and the rules by which the trainer divides a step.

    Args:
        placement: which group holds which shard types.
        accelerate: option of the controller.
    """

    reorders = True

    def __init__(self, placement: Placement, accelerate: bool | None = None):
        self._controller = Controller(placement, accelerate)
        self._begin()

    @property
    def stack(self) -> int:
        return self._controller.stack

    def reset(self) -> None:
        self._controller.reset()
        self._begin()

    def lose(self, groups: Sequence[int]) -> Loss:
        self._lost.update(groups)
        self._left.difference_update(groups)
        if not self._left:
            return Loss(True, 0)
        found = patches(self._controller, self._lost, self._left)
        depth, self._patched = found.depth(self._patched), found.groups
        return Loss(bool(found.adopted), depth)

    def committed(self) -> None:
        if self._lost:
            rearrange(self._controller, self._left)
            self._lost, self._patched = set(), {}

    def _begin(self) -> None:
        """Note that all groups are there, and none is lost in the present step."""
        self._left = set(range(self._controller.groups))
        self._lost: set[int] = set()
        self._patched: dict[int, int] = {}


class Replication:
    """Replication: ``degree`` groups form a block, in which every group computes the same shards.

    The last block is smaller if ``degree`` does not divide the number of groups. Every group computes all shards of its
    block in each step, so a loss needs no patch compute. Degree 1 is training with checkpoints alone.
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
        return Loss(any(not self._left[group // self.stack] for group in groups), 0)

    def committed(self) -> None:
        """Do nothing: blocks do not depend on the groups that are left."""


def block_sizes(groups: int, degree: int) -> list[int]:
    """Return the number of groups in each block of replication."""
    full, rest = divmod(groups, degree)
    return [degree] * full + [rest] * bool(rest)


def replication_endurance(groups: int, degree: int) -> float:
    """Return the exact expected number of random group failures until a block loses its last group. The last failure is
    included.

    With failure times uniform in 0..1, a block of size b survives until p with probability 1 - p^b. The integral over p
    of the product of these probabilities gives each number of failures the same weight, 1 / (N + 1) with N groups. The
    integral is a sum of beta functions.
    """
    full, rest = divmod(groups, degree)
    found = special.beta(1 / degree, full + 1)
    if rest:
        found -= special.beta((rest + 1) / degree, full + 1)
    return float((groups + 1) * found / degree)
