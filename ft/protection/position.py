"""The state of a training loop beside the model and the optimizer."""

from dataclasses import dataclass, field
from typing import Any, Protocol


class Position(Protocol):
    """The trainer's state besides model, optimizer and learning-rate schedule: number of the last committed step, data
    position, and all else that must be restored.
    """

    def get(self) -> dict[str, Any]:
        """Return the position as JSON values; ``"step"`` is the number of committed steps."""

    def set(self, position: dict[str, Any]) -> None:
        """Move the trainer to ``position``: backward, or forward on a worker that has just joined.

        Called on all workers once the process groups work again, so it may be collective.
        """


@dataclass
class StepCounter:
    """The position of a loop whose data depends only on the number of the step.

    Attributes:
        step: number of committed steps.
        extra: JSON values that are stored with the step.
    """

    step: int = 0
    extra: dict[str, Any] = field(default_factory=dict)

    def get(self) -> dict[str, Any]:
        return {"step": self.step, "extra": dict(self.extra)}

    def set(self, position: dict[str, Any]) -> None:
        self.step, self.extra = position["step"], dict(position["extra"])
