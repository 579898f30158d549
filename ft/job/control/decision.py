"""Decisions: the output of one call of :func:`ft.job.control.controller.decide`."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Note:
    """An event for the run's event file.

    Attributes:
        name: one of the names in ``ft.base.events``.
        values: all fields of the event in one mapping.
    """

    name: str
    values: dict[str, Any]


@dataclass(frozen=True)
class Decision:
    """One decision of the control plane.

    A decision without orders is recorded in the journal too, for example that a report was ignored, and why.

    Attributes:
        reason: why, for people.
        orders: the orders to send, in this sequence.
        events: the events to write to the event file.
    """

    reason: str
    orders: list[Any] = field(default_factory=list)
    events: list[Note] = field(default_factory=list)


class Decisions(list[Decision]):
    """The decisions of one call of ``decide``, in order."""

    def add(self, reason: str, *orders: Any) -> "Decisions":
        """Append a decision and return the list for chaining; ``note`` adds events to this decision."""
        self.append(Decision(reason, list(orders)))
        return self

    def note(self, name: str, **values: Any) -> "Decisions":
        """Add an event to the last decision."""
        self[-1].events.append(Note(name, values))
        return self
