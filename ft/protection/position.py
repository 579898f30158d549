"""Where a training loop stands, beside model and optimizer."""

from dataclasses import dataclass, field
from typing import Any, Protocol


class Position(Protocol):
    """The trainer's own state: number of the last committed step, data position, whatever else it must not lose."""

    def get(self) -> dict[str, Any]:
        """The position as JSON values; ``"step"`` is the number of committed steps."""

    def set(self, position: dict[str, Any]) -> None:
        """Goes back, or on a worker that has just joined forward, to ``position``.

        It is called on all workers alike, when groups work again, so it may be collective.
        """


@dataclass
class StepCounter:
    """The position of a loop whose data depend on the number of the step alone.

    Attributes:
        step: committed steps. extra: JSON values that go with it.
    """

    step: int = 0
    extra: dict[str, Any] = field(default_factory=dict)

    def get(self) -> dict[str, Any]:
        return {"step": self.step, "extra": dict(self.extra)}

    def set(self, position: dict[str, Any]) -> None:
        self.step, self.extra = position["step"], dict(position["extra"])
