"""Workers that are set up in another way than the others: found before they get a logical rank."""

from collections.abc import Mapping

from ft.base import events
from ft.faults import verdict
from ft.job import messages as m
from ft.job.control import epochs
from ft.job.control import run_ends as ends
from ft.job.control.decision import Decisions
from ft.job.control.state import GATHERING, State, Worker

EVENT = "settings"
_UNSET = "not set"
_MOST = 20


def compare(state: State, now: float, worker: Worker, settings: Mapping[str, str], out: Decisions) -> None:
    """Takes note of how ``worker`` says it is set up.

    Before training a difference ends the run: nothing is lost yet, and which of the two is meant only the user knows.
    Later it makes the newcomer unfit, and the run goes on without it.
    """
    if not state.settings:
        state.settings, state.settings_of = dict(settings), worker.name
        out.add(f"{worker.name} says how it is set up: {len(settings)} settings")
        return
    found = differences(settings, worker.name, state.settings, state.settings_of)
    if not found:
        out.add(f"{worker.name} is set up as {state.settings_of} is")
        return
    judged = verdict.of_drift(found)
    out.add(f"{worker.name}: {judged.category}: {judged.reason}")
    out.note(
        events.FAULT_DETECTED,
        epoch=max(state.epoch, 0),
        node=worker.node,
        worker=worker.name,
        rank=worker.meant,
        step=state.newest_step(),
        category=judged.category,
        action=judged.action if state.phase == GATHERING else verdict.REPLACE,
        reason=judged.reason,
        signal=judged.signal,
    )
    if state.phase == GATHERING:
        message = f"{worker.name}: {judged.reason}\n  fix: start every node with the same flags, environment and code"
        ends.stop(state, now, verdict.USER_CODE, message, out)
        return
    state.failed_starts += 1
    epochs.vacate(state, worker)
    out.add(f"{worker.name} must not join", m.Kill(worker.name, judged.reason))
    out.note(events.WORKER_LOST, node=worker.node, worker=worker.name, reason=judged.reason)


def differences(mine: Mapping[str, str], who: str, theirs: Mapping[str, str], whose: str) -> list[str]:
    """Sentences, one for each setting that ``who`` and ``whose`` do not share."""
    differ = [name for name in sorted({*mine, *theirs}) if mine.get(name) != theirs.get(name)]
    found = [
        f"{name}: {mine.get(name, _UNSET)} ({who}), {theirs.get(name, _UNSET)} ({whose})" for name in differ[:_MOST]
    ]
    return found + ([f"and {len(differ) - _MOST} more"] if len(differ) > _MOST else [])
