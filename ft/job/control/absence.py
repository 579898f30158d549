"""Handler for the first report of a control plane that takes over: it restarts all timers.

Silence of an agent while no control plane was listening is not evidence that this agent has failed.
"""

from dataclasses import replace

from ft.base import events
from ft.job import messages as m
from ft.job.control.decision import Decisions
from ft.job.control.state import State


def control_back(state: State, now: float, report: m.ControlBack, out: Decisions) -> None:
    """Restart every timer at ``now``. The agents resend all reports that the previous control plane has not
    recorded.
    """
    away = now - max([state.since, *(agent.heard_at for agent in state.agents.values())])
    state.since = now
    for agent in state.agents.values():
        agent.heard_at = now
        agent.held = {worker: replace(hold, since=now) for worker, hold in agent.held.items()}
    for worker in state.workers.values():
        worker.since, worker.left_at = now, now
    for node, times in state.spawning.items():
        state.spawning[node] = [now] * len(times)
    state.suspicions = {name: replace(suspicion, since=now) for name, suspicion in state.suspicions.items()}
    out.add(f"the control plane is back, beside the agent of {report.node} (term {report.term}), after {away:.1f} s")
    if report.damaged:
        text = f"{report.damaged} damaged line(s) of the control plane's journal were skipped: what they said is lost"
        out.add(text, m.Notice(text))
    out.note(events.CONTROL_BACK, node=report.node, term=report.term, away=round(away, 3), damaged=report.damaged)
