"""The control plane's decisions: ``decide(state, now, report)`` is the only function that changes the state.

It reads no clock, draws no rng and does no I/O: the same code runs in production, in simulation and in a replay of the
journal. Everything that depends on time alone is decided when ``decide`` is called without a report, and such a call
that decides nothing leaves the state as it was.
"""

from collections.abc import Callable
from typing import Any

from ft.job import messages as m
from ft.job.control import absence, arrivals, deadlines, epochs, failures
from ft.job.control.decision import Decision, Decisions
from ft.job.control.state import ENDED, State


def decide(state: State, now: float, report: Any | None) -> list[Decision]:
    """Takes one report in, or that time has passed (None).

    Args:
        state: is changed in place. now: seconds on one clock that never goes back; the same for all calls.

    Returns:
        what was decided, in order; the orders go out in the sequence in which they stand there.
    """
    out = Decisions()
    if state.phase == ENDED:
        return out
    if report is None:
        deadlines.judge(state, now, out)
    else:
        handler = _HANDLERS.get(type(report))
        if handler is None:
            return out.add(f"ignored: {type(report).__name__} is no report for the control plane")
        handler(state, now, report, out)
    if out:  # a heartbeat, or that time has passed, changes nothing by itself
        epochs.advance(state, now, out)
    return out


def next_deadline(state: State, now: float) -> float:
    """When to call ``decide`` without a report, if none comes before; never in the past."""
    return now + 3600.0 if state.phase == ENDED else deadlines.following(state, now)


_HANDLERS: dict[type, Callable[[State, float, Any, Decisions], None]] = {
    m.AgentJoined: arrivals.agent_joined,
    m.AgentBeat: arrivals.agent_beat,
    m.AgentLeaving: arrivals.agent_leaving,
    m.WorkerStarted: arrivals.worker_started,
    m.WorkerReady: arrivals.worker_ready,
    m.WorkerReleased: arrivals.worker_released,
    m.WorkerArrived: arrivals.worker_arrived,
    m.WorkerRepaired: arrivals.worker_repaired,
    m.WorkerResumed: arrivals.worker_resumed,
    m.WorkerDone: arrivals.worker_done,
    m.Observed: arrivals.observed,
    m.MasterChosen: arrivals.master_chosen,
    m.ControlBack: absence.control_back,
    m.WorkerExited: failures.worker_exited,
    m.WorkerSilent: failures.worker_silent,
    m.WorkerFailed: failures.worker_failed,
    m.WorkerSuspects: failures.worker_suspects,
}
