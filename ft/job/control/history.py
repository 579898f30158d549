"""What earlier failures, and findings of nodes about themselves, change in the verdict on a failure.

A failure that recurs gets a stronger action than its first occurrence. Findings (``ft run --health drain``) are events
only, by default. A finding whose event says that it acts speaks against its own device or node: the agent reports such
a device as unusable, a node is suspected from then on and gets no further workers, and the finding replaces what the
text of an exception suggests about a failed worker.
"""

from dataclasses import fields
from typing import Any

from ft.base import events
from ft.faults.health import Finding, informed
from ft.faults.verdict import REPLACE, RESTART, RETRY, SOFTWARE, STOP, Verdict, raised
from ft.job.control.state import ControlState, Decisions, PastFault, RecoveryInProgress, Return, Worker

WINDOW_S, WINDOW_STEPS = 60.0, 10
"""Failures of one logical rank that are closer in time, or in steps, than this count as repetitions."""
MOST_RETRIES = 2
"""Number of retries in place after which a worker is replaced."""
MOST_REPLACEMENTS = 2
"""Number of replacements for the same error at the same step after which all workers restart."""
MOST_RETURNS = 2
"""Number of rollbacks to the same step without a new failure after which the run ends."""
_REMEMBERED = 200
"""Number of failures that are kept."""


def weigh(history: list[PastFault], now: float, rank: int | None, step: int, found: Verdict) -> Verdict:
    """Return the verdict on a failure, escalated if earlier failures require it.

    - RETRY becomes REPLACE if the same rank was retried in place twice within the window (DEADPOOL, section VI-B).
    - REPLACE becomes RESTART if the same rank was replaced twice for the same error at the same step: the error comes
      from the computation, not from the node. Unanswered waits are excluded; ``going_round`` handles them.
    - RESTART becomes STOP if the same software error has led to a restart at the same step or a neighbouring one:
      another restart would end in the same error.
    """
    mine = [incident for incident in history if incident.rank == rank]
    if found.action == RETRY:
        close = [i for i in mine if i.action == RETRY and (now - i.at < WINDOW_S or abs(step - i.step) < WINDOW_STEPS)]
        if len(close) >= MOST_RETRIES:
            found = raised(found, REPLACE, f"retried {len(close)} times in vain, no longer taken for transient")
    if found.action == REPLACE:
        same = [i for i in mine if i.action == REPLACE and i.step == step and i.key == found.key]
        if len(same) >= MOST_REPLACEMENTS and not found.in_vain:
            found = raised(found, RESTART, f"{len(same)} replacements failed alike at step {step}")
    if found.action == RESTART and found.category == SOFTWARE:
        same = [i for i in history if i.action == RESTART and abs(i.step - step) <= 1 and i.key == found.key]
        if same:
            found = raised(found, STOP, f"the same error as before the warm restart, again after step {step}")
    return found


def returned(before: list[Return], step: int, recovery: RecoveryInProgress, fired: int) -> list[Return]:
    """Return the list of rollbacks to ``step`` without a new failure in between; the last entry is this rollback.

    The list ``before`` is continued only if training stopped after the same step, nothing has died or raised an error
    since, and no further fault was injected. Otherwise the new list has one entry.
    """
    this = Return(step, list(recovery.verdicts), fired)
    goes_on = bool(before) and recovery.in_vain and (before[-1].step, before[-1].fired) == (step, fired)
    return [*before, this] if goes_on else [this]


def going_round(returns: list[Return]) -> str:
    """Return why the run should end instead of rolling back again, or "" if another rollback is worthwhile.

    Up to ``MOST_RETURNS`` fruitless rollbacks to one step may be a coincidence.
    """
    if len(returns) <= MOST_RETURNS:
        return ""
    lines = [
        f"training has stopped {len(returns)} times after committed step {returns[-1].step}, and since the first time "
        "nothing has died, no error was raised and no fault injected:",
        *(f"  {number}. {'; '.join(one.verdicts)}" for number, one in enumerate(returns, 1)),
        "  going back once more would lead there again: look for a group operation that not all ranks of its group "
        "take part in, or for one that never ends",
    ]
    return "\n".join(lines)


def record(history: list[PastFault], now: float, rank: int | None, step: int, found: Verdict) -> None:
    """Append a failure to the history, and drop the oldest entries."""
    history.append(PastFault(now, rank, step, found.action, found.key))
    del history[:-_REMEMBERED]


FRESH_S = 300.0
"""Seconds for which a finding explains failures of workers."""
_NAMES = {each.name for each in fields(Finding)} - {"when"}


def record_finding(state: ControlState, now: float, detail: dict[str, Any], out: Decisions) -> None:
    """Record a finding: the event ``events.HEALTH_FOUND`` as the agent has reported it."""
    agent = state.agents.get(str(detail.get("node")))
    out.add(f"observed: {events.HEALTH_FOUND}").note(events.HEALTH_FOUND, **detail)
    if agent is None or agent.gone or not detail.get("acts") or not detail.keys() >= _NAMES:
        return
    index = detail.get("index")
    device = detail["device"] if index is None else f"gpu{index}"
    found = Finding(**{name: detail[name] for name in _NAMES} | {"device": device}, when=now)
    agent.evidence = [each for each in agent.evidence if now - each.when < FRESH_S] + [found]
    if index is None and not agent.suspect:
        agent.suspect = found.reason
        out.add(f"{agent.node} gets no further workers: {found.reason}")


def weigh_findings(state: ControlState, now: float, worker: Worker, guess: Verdict) -> Verdict:
    """Return the verdict on a failed worker in the light of what its own node has found, as ``informed`` does."""
    agent = state.agents.get(worker.node)
    if agent is None or not agent.evidence:
        return guess
    fresh = [each for each in agent.evidence if now - each.when < FRESH_S]
    return informed(guess, fresh, f"gpu{worker.local_rank}" if agent.joined.devices else "")
