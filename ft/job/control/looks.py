"""Orders a look at all workers when a run seems to hang: what each is doing, for the search for the cause.

A look is ordered shortly before a time limit passes, because the recovery that follows ends the hanging operations and
kills the workers at fault. So it delays no recovery. The answers are stored by the agents; no decision depends on them.
"""

from ft.base import events
from ft.job import messages as m
from ft.job.control.decision import Decisions
from ft.job.control.state import State

LEAD_S = 0.5
"""Seconds before the end of a time limit at which the look is ordered. The answers take some milliseconds."""
_AGAIN_S = 5.0
"""Seconds within which no second look at the same epoch is taken by itself."""


def order(state: State, now: float, why: str, out: Decisions, *, asked: bool = False) -> None:
    """Order a look, unless one was taken just before.

    Args:
        state: state of the control plane.
        now: the present time, in seconds.
        why: why, for people.
        out: the decisions, to which the order is added.
        asked: whether a person has asked for it.
    """
    is_recent = state.looked_in == state.epoch and now - state.looked_at < _AGAIN_S
    if not state.seats or (is_recent and not asked):
        return
    state.looked_at, state.looked_in, state.looks = now, state.epoch, state.looks + 1
    state.look_why = "" if asked else why
    seats = {str(rank): worker for rank, worker in sorted(state.seats.items())}
    out.add(f"look {state.looks} at all workers: {why}", m.Look(state.looks, why, seats))
    out.note(events.LOOKED, epoch=max(state.epoch, 0), step=state.newest_step(), number=state.looks, reason=why)


def wanted(state: State, now: float, report: m.LookWanted, out: Decisions) -> None:
    """Handle a person's wish for a look."""
    if state.attached and state.seats:
        order(state, now, report.why, out, asked=True)
    else:
        out.add("ignored: a look is wanted, and no worker holds a logical rank")
