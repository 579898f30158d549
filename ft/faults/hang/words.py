"""Says in sentences what ranks have started, and how a step departs from the step before it."""

from ft.faults.hang import look as looks
from ft.faults.hang.look import Departure, Operation, Rank
from ft.faults.hang.places import COMMUNICATION, place, where


def call(operation: str, values: Operation) -> str:
    """Return the name of an operation with the sizes of its tensors and the line that started it."""
    sizes = f"with {', '.join(values.sizes)} " if values.sizes else ""
    return f"{operation} {sizes}at {values.site or 'an unknown line'}"


def place_of(said: Rank) -> str:
    """Return where a rank is: in its first operation that has not ended, or what its training thread does."""
    operation = next(iter(said.pending), None)
    if operation is None:
        return where(said)
    if said.training is None or place(said.training) == COMMUNICATION:
        return f"in {operation}" + (f", which was started at {operation.site}" if operation.site else "")
    return f"in {operation}: {where(said)}"


def of_departure(departed: Departure) -> str:
    """Return how a rank's present step departs from its step before."""
    due, found = departed.expected, departed.found
    how = {
        looks.SKIPPED: f"left out {_named(due)}, and started {_named(found)}",
        looks.SWAPPED: f"took {_named(found)} before {_named(due)}",
        looks.ADDED: f"started {_named(found)}, which no step before had there",
        looks.CHANGED: f"changed {_named(due)} from {_form(due)} to {_form(found)}",
    }[departed.kind]
    return f"compared with its step before, it {how}"


def _named(operation: Operation) -> str:
    return f"{operation.name} of group {operation.group}" + (f" at {operation.site}" if operation.site else "")


def _form(operation: Operation) -> str:
    peer = f" and rank {operation.peer}" if operation.is_message else ""
    return f"{', '.join(operation.sizes) or 'unknown sizes'}{peer}"
