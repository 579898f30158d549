"""What one call of the controller comes to."""

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Decision:
    """Orders in their sequence, events as (name, values), and why."""

    reasons: list[str] = field(default_factory=list)
    orders: list[Any] = field(default_factory=list)
    events: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    def because(self, reason: str) -> "Decision":
        self.reasons.append(reason)
        return self

    def order(self, order: Any) -> None:
        self.orders.append(order)

    def event(self, name: str, **values: Any) -> None:
        self.events.append((name, values))

    def __bool__(self) -> bool:
        return bool(self.reasons or self.orders or self.events)
