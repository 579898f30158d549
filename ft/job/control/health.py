"""What the control plane makes of the findings of nodes about themselves (``ft run --health drain``).

By default findings are events only. A finding whose event says that it acts speaks against its own device or node: the
agent reports such a device as unusable, a node is suspected from then on and gets no further workers, and the finding
replaces what the text of an exception suggests about a failed worker.
"""

from dataclasses import fields
from typing import Any

from ft.base import events
from ft.faults.health import Finding, informed
from ft.faults.verdict import Verdict
from ft.job.control.decision import Decisions
from ft.job.control.state import Evidence, State, Worker

FRESH_S = 300.0
"""Seconds for which a finding explains failures of workers."""
_NAMES = {each.name for each in fields(Finding)} - {"when"}


def record(state: State, now: float, detail: dict[str, Any], out: Decisions) -> None:
    """Record a finding.

    Args:
        state: state of the control plane.
        now: time in seconds.
        detail: the event ``events.HEALTH_FOUND`` as the agent has reported it.
        out: decisions.
    """
    agent = state.agents.get(str(detail.get("node")))
    out.add(f"observed: {events.HEALTH_FOUND}").note(events.HEALTH_FOUND, **detail)
    if agent is None or agent.gone or not detail.get("acts") or not detail.keys() >= _NAMES:
        return
    index = detail.get("index")
    device = detail["device"] if index is None else f"gpu{index}"
    found = Finding(**{name: detail[name] for name in _NAMES} | {"device": device}, when=now)
    agent.evidence = [each for each in agent.evidence if now - each.at < FRESH_S] + [Evidence(now, found)]
    if index is None and not agent.suspect:
        agent.suspect = found.reason
        out.add(f"{agent.node} gets no further workers: {found.reason}")


def weigh(state: State, now: float, worker: Worker, guess: Verdict) -> Verdict:
    """Return the verdict on a failed worker in the light of what its own node has found, as ``informed`` does."""
    agent = state.agents.get(worker.node)
    if agent is None or not agent.evidence:
        return guess
    fresh = [each.finding for each in agent.evidence if now - each.at < FRESH_S]
    return informed(guess, fresh, f"gpu{worker.local_rank}" if agent.devices else "")
