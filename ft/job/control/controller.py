"""The decision function of the control plane: only ``decide(state, now, report)`` changes the state.

``decide`` reads no clock, draws no random number and does no I/O, so the same code runs in production, in simulation
and when the journal is replayed. Decisions that depend only on time are made when ``decide`` is called without a
report. Such a call leaves the state as it was if no deadline has passed.
"""

from collections.abc import Callable
from typing import Any

from ft.job import messages as m
from ft.job.control import (
    arrivals,
    deadlines,
    devices,
    epochs,
    failures,
    inspections,
    run_ends,
    start_checks,
    stragglers,
)
from ft.job.control.state import ENDED, ControlState, Decisions, RecordedDecision


def decide(state: ControlState, now: float, report: Any | None) -> list[RecordedDecision]:
    """Process one report, or the passing of time if ``report`` is None.

    Args:
        state: state of the control plane; changed in place.
        now: time in seconds on one monotonic clock, the same clock for all calls.
        report: a report of ``ft.job.messages``, or None.

    Returns:
        The decisions, in order. Their orders are sent in this sequence.
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
    if out:  # a heartbeat or the passing of time without a decision cannot complete a phase
        epochs.advance(state, now, out)
    return out


def next_deadline(state: ControlState, now: float) -> float:
    """Return the time at which to call ``decide`` without a report if no report arrives before; never in the past."""
    return now + 3600.0 if state.phase == ENDED else deadlines.following(state, now)


_HANDLERS: dict[type, Callable[[ControlState, float, Any, Decisions], None]] = {
    m.AgentJoined: arrivals.agent_joined,
    m.AgentBeat: arrivals.agent_beat,
    m.AgentLeaving: arrivals.agent_leaving,
    m.EndWanted: run_ends.told_to_end,
    m.WorkerStarted: arrivals.worker_started,
    m.WorkerReady: arrivals.worker_ready,
    m.WorkerReleased: arrivals.worker_released,
    m.WorkerArrived: arrivals.worker_arrived,
    m.WorkerInherited: arrivals.worker_inherited,
    m.WorkerRepaired: arrivals.worker_repaired,
    m.WorkerResumed: arrivals.worker_resumed,
    m.WorkerDone: arrivals.worker_done,
    m.DeviceReleased: devices.released,
    m.Observed: arrivals.observed,
    m.PaceJudged: stragglers.pace_judged,
    m.MasterChosen: arrivals.master_chosen,
    m.InspectionWanted: inspections.wanted,
    m.InspectionAnswered: inspections.taken,
    m.HangJudged: inspections.judged,
    m.PeerUnreached: start_checks.peer_unreached,
    m.NodeRefused: start_checks.node_refused,
    m.ControlBack: arrivals.control_back,
    m.WorkerExited: failures.worker_exited,
    m.WorkerSilent: failures.worker_silent,
    m.WorkerFailed: failures.worker_failed,
    m.WorkerSuspects: failures.worker_suspects,
}
