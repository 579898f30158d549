"""The cause of the hang from which a run has recovered, from the look that it took shortly before."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from ft.base import events
from ft.base.errors import UserError
from ft.faults.hang.causes import BUSY
from ft.faults.hang.format import Who
from ft.faults.hang.series import over_time
from ft.record import looks
from ft.record.recoveries import Recovery

_BEFORE_S = 6.0
"""Seconds before a fault was detected within which the look at it was taken; it is taken once in 5 s at most."""


class Cause(NamedTuple):
    """The cause of a hang, for people.

    Attributes:
        what: its kind, and the ranks at fault.
        why: how that is known, or where the rank is.
        more: the command that says everything.
    """

    what: str
    why: str
    more: str


def cause(run: Path, history: Sequence[events.Event], recovery: Recovery) -> Cause | None:
    """Return the cause of a hang; None if the run has taken no look, or nobody was at fault in it.

    Args:
        run: folder of the run.
        history: all events of the run.
        recovery: the recovery from the hang.
    """
    number = _look_of(history, recovery)
    if number is None:
        return None
    try:
        look = replace(looks.read(run, number), hosts=events.hosts(history))
    except (UserError, OSError):  # what the run tells of itself must not depend on a file that cannot be read
        return None
    found = over_time([look])
    if not found.causes:
        return None
    first = found.causes[0]
    who = Who(look).title(first.guilty)
    more = f" and {len(found.causes) - 1} more" if len(found.causes) > 1 else ""
    why = first.where if first.kind == BUSY else first.evidence[0]
    return Cause(f"{first.kind}: {who}{more}", why, f"ft diagnose hang {run} --look {number}")


def _look_of(history: Sequence[events.Event], recovery: Recovery) -> int | None:
    """Return the number of the last look shortly before the fault was detected; None if there is none."""
    taken = [
        event
        for event in history
        if event.name == events.LOOKED
        and event.epoch == recovery.closed
        and 0 <= recovery.detected_at - event.wall < _BEFORE_S
    ]
    return int(taken[-1].detail["number"]) if taken else None
