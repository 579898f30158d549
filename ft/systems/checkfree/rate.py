"""The learning rate of a pipeline stage that CheckFree has rebuilt as the mean of its neighbours (CheckFree, section
4.2). The rate is raised, so that the stage diverges from its neighbours.
"""

from collections.abc import Iterable, MutableMapping
from dataclasses import dataclass
from typing import Any

from ft.base.errors import UserError

BOOST = 1.1
"""Factor of the learning rate (CheckFree, section 4.2); the code of its authors has 1.2 for its 500M model."""

_HIGHEST = 100.0


@dataclass(frozen=True)
class Boost:
    """The increase of the learning rate and its duration.

    Attributes:
        factor: factor right after a rebuild.
        decay_steps: number of steps over which the factor falls linearly to 1; with 0 the factor stays the same, as in
            CheckFree, section 4.2.

    Raises:
        UserError: a value is out of range.
    """

    factor: float = BOOST
    decay_steps: int = 0

    def __post_init__(self):
        if not 0.0 < self.factor <= _HIGHEST:
            raise UserError(f"a learning rate x {self.factor}", f"give a factor above 0, up to {_HIGHEST:g}")
        if self.decay_steps < 0:
            raise UserError(f"a factor that decays over {self.decay_steps} steps", "give 0 (it stays) or more")

    def at(self, step: int, rebuilt_at: int | None) -> float:
        """Return the factor of a stage's learning rate in ``step``.

        The factor depends on the last rebuild alone, so that the factors of repeated failures are not multiplied.

        Args:
            step: number of the step.
            rebuilt_at: the stage was last rebuilt before this step; None if it was never rebuilt.
        """
        if rebuilt_at is None or step < rebuilt_at:
            return 1.0
        if not self.decay_steps:
            return self.factor
        left = max(0.0, 1.0 - (step - rebuilt_at) / self.decay_steps)
        return 1.0 + (self.factor - 1.0) * left


def scale(groups: Iterable[MutableMapping[str, Any]], max_lr: float, min_lr: float, factor: float) -> None:
    """Set the rates that megatron-core's scheduler reads at every step to ``factor`` times those of the schedule.

    Args:
        groups: parameter groups; they are changed in place.
        max_lr: highest learning rate of the schedule.
        min_lr: lowest learning rate of the schedule.
        factor: see :meth:`Boost.at`.
    """
    for group in groups:
        group["max_lr"], group["min_lr"] = max_lr * factor, min_lr * factor
