"""What was asked of CheckFree."""

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
    """How lost stages are rebuilt.

    Attributes:
        strategy: of :data:`ft.systems.checkfree.rebuild.STRATEGIES`. boost: of the rebuilt stage's learning rate.
        norm_limit: gradient norms above it count as it in the weights; None: raw.
        reseed: called with a step: seeds this rank's random number generators for its place, at that step.
        seed: of the run, for the strategy "random".
        rebuilt_at: pipeline stage, as text -> the step at which it was last rebuilt: a mapping to write into, which the
            trainer keeps with its position and in checkpoints.
        doubles: who has embedding and head twice, so that the first and the last stage can be rebuilt; None: nobody.
    """

    strategy: str = WEIGHTED
    boost: Boost = field(default_factory=Boost)
    norm_limit: float | None = None
    reseed: Callable[[int], None] = lambda step: None
    seed: int = 0
    rebuilt_at: Callable[[], dict[str, int]] = field(default_factory=_own_mapping)
    doubles: "ReplicatedEnds | None" = None
