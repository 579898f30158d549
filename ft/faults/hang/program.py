"""Compares the communication operations of a rank's present training step with those of its previous step.

A training step starts the same operations in the same order every time. A rank that leaves one out, adds one or swaps
two departs from this; a rank that only waits for it has started the beginning of its usual step. Steps differ without a
fault, too (an evaluation, a batch that grows), but then all ranks of a group depart together.
"""

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

from ft.faults.hang.look import ADDED, CHANGED, SKIPPED, SWAPPED

_NEAR = 64
"""Number of operations within which a skipped or swapped operation is looked for."""


class Started(Protocol):
    """An operation that was started. ``sizes`` and ``site`` may be any values that are equal for equal operations."""

    @property
    def group(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def peer(self) -> int | None: ...
    @property
    def sizes(self) -> Any: ...
    @property
    def site(self) -> Any: ...


T = TypeVar("T", bound=Started)


def departure(before: Sequence[T], now: Sequence[T]) -> tuple[str, T, T] | None:
    """Return the first departure of a step from the step before; None if ``now`` is a beginning of ``before``.

    Args:
        before: all operations of the step before, in the order in which they were started.
        now: the operations of the present step so far.

    Returns:
        (kind, the operation that was due, the operation that was started instead); see
        :class:`ft.faults.hang.look.Departure`.
    """
    if not before:
        return None
    at = next((i for i, (old, new) in enumerate(zip(before, now, strict=False)) if _what(old) != _what(new)), None)
    if at is None:
        return None if len(now) <= len(before) else (ADDED, before[-1], now[len(before)])
    due, found = before[at], now[at]
    if (due.group, due.name, due.site) == (found.group, found.name, found.site):
        return CHANGED, due, found
    ahead = before[at + 1 : at + 1 + _NEAR]
    if _what(found) in map(_what, ahead):
        # A rank that makes up for the operation has taken two in the other order.
        after, usual = (
            [_what(one) for one in steps[place : place + 1]] for steps, place in ((now, at + 1), (before, at + 2))
        )
        is_made_up = _what(found) == _what(ahead[0]) and after == [_what(due)] != usual
        return SWAPPED if is_made_up else SKIPPED, due, found
    # The same call from another line is a branch of the program in which the order is another one.
    return SWAPPED if _call(found) in map(_call, ahead) else ADDED, due, found


def missing_end(before: Sequence[T], now: Sequence[T], after: Sequence[T]) -> tuple[str, T, T] | None:
    """Return the departure of a step that has ended although it is shorter than the step before, or None.

    Args:
        before: all operations of the step before.
        now: all operations of the step.
        after: the operations that were started since.
    """
    return (SKIPPED, before[len(now)], after[0]) if len(now) < len(before) and after else None


def _what(one: Started) -> tuple:
    return (*_call(one), one.site)


def _call(one: Started) -> tuple:
    return (one.group, one.name, one.peer, one.sizes)
