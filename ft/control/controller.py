"""The control plane's decisions: ``decide(state, now, report)`` is the only function that changes the state.

It reads no clock and does no I/O: the same code runs in production and in simulation.
"""

from typing import Any

from ft import events
from ft import messages as m
from ft.control import failures, life, recovery
from ft.control.decision import Decision
from ft.control.state import ENDED, State


def decide(state: State, now: float, report: Any | None) -> Decision:
    """Takes one report in, or that time has passed (None); returns what is to be done about it."""
    decision = Decision()
    if state.phase == ENDED:
        return decision
    if report is not None:
        _HANDLERS.get(type(report), lambda *_: None)(state, now, report, decision)
    if state.phase != ENDED:
        failures.judge_time(state, now, decision)
    if state.phase != ENDED:
        recovery.advance(state, now, decision)
    return decision


def next_deadline(state: State, now: float) -> float:
    """When to call ``decide`` again if nothing comes before."""
    wanted = [now + state.options.timeouts.agent_beat_s]
    if state.deadline is not None:
        wanted.append(state.deadline)
    return max(now, min(wanted))


def _agent_beat(state: State, now: float, report: m.AgentBeat, decision: Decision) -> None:
    agent = state.agents.get(report.node)
    if agent is not None:
        agent.last_beat = now
    for name, beat in report.workers.items():
        state.beats[name] = (now, beat)
        if name in state.seats.values():
            state.step = max(state.step, beat.step)


def _observed(state: State, now: float, report: m.Observed, decision: Decision) -> None:
    detail = report.detail
    if report.event == "layout":
        state.dp_peers.update({int(r): list(peers) for r, peers in detail.get("dp_peers", {}).items()})
        state.shards.update({int(r): list(names) for r, names in detail.get("shards", {}).items()})
        return
    if report.event == events.FAULT_INJECTED and "number" in detail and detail["number"] not in state.fired:
        state.fired.append(detail["number"])
    if report.event in events.SCHEMA:
        decision.event(report.event, **detail)


_HANDLERS = {
    m.AgentJoined: life.agent_joined,
    m.AgentBeat: _agent_beat,
    m.AgentLeaving: life.agent_leaving,
    m.WorkerStarted: life.worker_started,
    m.WorkerReady: life.worker_ready,
    m.WorkerDone: life.worker_done,
    m.WorkerExited: failures.worker_exited,
    m.WorkerSilent: failures.worker_silent,
    m.WorkerFailed: failures.worker_failed,
    m.WorkerSuspects: failures.worker_suspects,
    m.WorkerReleased: recovery.worker_released,
    m.WorkerArrived: recovery.worker_arrived,
    m.WorkerRepaired: recovery.worker_repaired,
    m.WorkerResumed: recovery.worker_resumed,
    m.Observed: _observed,
}
