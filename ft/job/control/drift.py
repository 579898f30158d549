"""Detection of workers whose flags, environment or code differ from the others, before they get a logical rank."""

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
    """Compare the settings that ``worker`` reported with those of the first worker.

    Before training begins, a difference ends the run: nothing is lost yet, and only the user knows which setting is
    right. Later, only the new worker is rejected, and the run continues without it.
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
        rank=worker.started_for,
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
    epochs.vacate(state, worker, now)
    out.add(f"{worker.name} must not join", m.Kill(worker.name, judged.reason))
    out.note(events.WORKER_LOST, node=worker.node, worker=worker.name, reason=judged.reason)


def differences(mine: Mapping[str, str], who: str, theirs: Mapping[str, str], whose: str) -> list[str]:
    """Return one sentence for each setting that differs.

    Args:
        mine: the settings of one worker.
        who: its name.
        theirs: the settings of the other worker.
        whose: its name.
    """
    differ = [name for name in sorted({*mine, *theirs}) if mine.get(name) != theirs.get(name)]
    found = [
        f"{name}: {mine.get(name, _UNSET)} ({who}), {theirs.get(name, _UNSET)} ({whose})" for name in differ[:_MOST]
    ]
    return found + ([f"and {len(differ) - _MOST} more"] if len(differ) > _MOST else [])
