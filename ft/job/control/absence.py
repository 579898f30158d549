"""Handler for the report of a control plane that has taken over, or was paused: it moves the begin of all timers.

Silence of an agent while no control plane was listening is not evidence that this agent has failed.
"""

import math
from dataclasses import replace

from ft.base import events
from ft.job import messages as m
from ft.job.control.decision import Decisions
from ft.job.control.state import State


def control_back(state: State, now: float, report: m.ControlBack, out: Decisions) -> None:
    """After a failover, restart every timer at ``now``: the agents resend all reports that the previous control plane
    has not recorded. After a pause of this control plane, extend every timer by the pause.
    """
    if report.paused_s:
        forgive(state, now, report.paused_s)
        out.add(f"the control plane was paused for {report.paused_s:.1f} s, which counts for no limit")
        return
    away = now - max([state.since, *(agent.heard_at for agent in state.agents.values())])
    forgive(state, now)
    out.add(f"the control plane is back, beside the agent of {report.node} (term {report.term}), after {away:.1f} s")
    if report.damaged:
        text = f"{report.damaged} damaged line(s) of the control plane's journal were skipped: what they said is lost"
        out.add(text, m.Notice(text))
    out.note(events.CONTROL_BACK, node=report.node, term=report.term, away=round(away, 3), damaged=report.damaged)


def forgive(state: State, now: float, seconds: float = math.inf) -> None:
    """Let every timer begin ``seconds`` later, but not after ``now``."""

    def later(at: float) -> float:
        return min(now, at + seconds)

    state.since = later(state.since)
    for agent in state.agents.values():
        agent.heard_at = later(agent.heard_at)
        agent.held = {worker: replace(hold, since=later(hold.since)) for worker, hold in agent.held.items()}
    for worker in state.workers.values():
        worker.since, worker.left_at = later(worker.since), later(worker.left_at)
    for node, times in state.spawning.items():
        state.spawning[node] = [later(at) for at in times]
    state.suspicions = {
        name: replace(suspicion, since=later(suspicion.since)) for name, suspicion in state.suspicions.items()
    }
