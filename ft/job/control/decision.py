"""What one call of the controller comes to."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Note:
    """An event for the event file: a name of ``ft.base.events`` and its values, places and detail in one mapping."""

    name: str
    values: dict[str, Any]


@dataclass(frozen=True)
class Decision:
    """Something decided: why, in words; orders in the sequence in which they go out; what the event file says of it.

    Without orders it is worth a line in the journal all the same: a report that was ignored, and why.
    """

    reason: str
    orders: list[Any] = field(default_factory=list)
    events: list[Note] = field(default_factory=list)


class Decisions(list[Decision]):
    """The decisions of one call, in order."""

    def add(self, reason: str, *orders: Any) -> "Decisions":
        """A decision; ``note`` adds events to the last one."""
        self.append(Decision(reason, list(orders)))
        return self

    def note(self, name: str, **values: Any) -> "Decisions":
        self[-1].events.append(Note(name, values))
        return self
