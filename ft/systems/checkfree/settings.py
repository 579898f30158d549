"""The settings of CheckFree, which rebuilds a lost pipeline stage from its neighbours, in a training run."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ft.systems.checkfree.rate import Boost
from ft.systems.checkfree.rebuild import WEIGHTED

if TYPE_CHECKING:
    from ft.systems.checkfree.plus.replicated_ends import ReplicatedEnds


def _own_mapping() -> Callable[[], dict[str, int]]:
    kept: dict[str, int] = {}
    return lambda: kept


@dataclass(frozen=True)
class Settings:
    """The settings of one rank for the rebuild of lost stages.

    Attributes:
        strategy: one of :data:`ft.systems.checkfree.rebuild.STRATEGIES`.
        boost: increase of the rebuilt stage's learning rate.
        norm_limit: upper bound of the gradient norms by which the neighbours are weighted; a larger norm is replaced by
            it. None for raw norms.
        reseed: seeds this rank's random number generators for its position in the process grid and the given step.
        seed: seed of the run, for the strategy "random".
        rebuilt_at: returns a mutable mapping from pipeline stage, as text, to the step at which it was last rebuilt.
            The trainer stores it with its position and in checkpoints.
        draws_apart: whether data-parallel ranks draw different random numbers.
        replicated_ends: the replicas of embedding and output layer (CheckFree+), with which the first and the last
            stage can be rebuilt; None without CheckFree+.
    """

    strategy: str = WEIGHTED
    boost: Boost = field(default_factory=Boost)
    norm_limit: float | None = None
    reseed: Callable[[int], None] = lambda step: None
    seed: int = 0
    rebuilt_at: Callable[[], dict[str, int]] = field(default_factory=_own_mapping)
    replicated_ends: "ReplicatedEnds | None" = None
    draws_apart: bool = False
