"""Handlers of the control plane for reports of failures, and the reaction to each failure.

A reaction first classifies the failure (a verdict of ``ft.faults.verdict``), then removes, replaces or retries workers.
"""

from dataclasses import dataclass, replace

from ft.base import events
from ft.faults import verdict
from ft.faults.verdict import REPLACE, RESTART, RETRY, SEVERITY, SOFTWARE, STOP, TRANSIENT, Verdict
from ft.job import messages as m
from ft.job.control import devices, epochs, history, inspections
from ft.job.control import run_ends as ends
from ft.job.control.state import (
    CLOSED,
    EPOCH_OPEN,
    GATHERING,
    REPAIRING,
    RESUMING,
    Agent,
    ControlState,
    Decisions,
    Suspicion,
    Worker,
)


@dataclass(frozen=True)
class WorkerFault:
    """A failed worker and the verdict on it.

    Attributes:
        worker: the worker.
        verdict: category of the failure and the action to take.
        dead: whether its process has ended, or runs on a lost node where no agent can kill it.
    """

    worker: Worker
    verdict: Verdict
    dead: bool = False


def worker_exited(state: ControlState, now: float, report: m.WorkerExited, out: Decisions) -> None:
    """Handle the exit of a worker's process, which depends on whether the worker has a seat."""
    worker = state.workers.get(report.worker)
    if worker is None or worker.left:
        out.add(f"ignored: {report.worker} is known to be gone")
    elif worker.rank is not None:
        _seated_exit(state, now, worker, report.code, out)
    elif worker.started_for is not None:
        _early_exit(state, now, worker, report.code, out)
    else:
        _standby_exit(state, now, worker, report.code, out)


def worker_silent(state: ControlState, now: float, report: m.WorkerSilent, out: Decisions) -> None:
    """Handle a worker that sends no heartbeats."""
    worker = state.workers.get(report.worker)
    if worker is None or worker.left:
        out.add(f"ignored: {report.worker} is known to be gone")
        return
    if worker.rank is not None:
        inspections.order(state, now, f"{worker.name} sends no heartbeats", out)
    react(state, now, [WorkerFault(worker, verdict.of_silence(report.silent_s, report.state))], out)


def worker_failed(state: ControlState, now: float, report: m.WorkerFailed, out: Decisions) -> None:
    """Handle the report of an exception in a worker."""
    worker = state.workers.get(report.worker)
    if worker is None or worker.left:
        out.add(f"ignored: {report.worker} is known to be gone")
        return
    found = history.weigh_findings(state, now, worker, verdict.of_error(report.kinds, report.message))
    if worker.rank is None and worker.started_for is None:  # a standby that found itself unfit: nothing is to recover
        tell(state, WorkerFault(worker, found), out)
        remove(state, now, WorkerFault(worker, found), out)
        return
    is_stale = report.epoch != state.epoch or state.phase not in EPOCH_OPEN
    if is_stale and found.action in (RETRY, RESTART) and state.phase != GATHERING:
        out.add(
            f"ignored: {report.worker} failed in epoch {report.epoch}, which is over, and its error may come of "
            f"that end: {found.reason}"
        )
        return
    if "FallbackError" in report.kinds and state.phase == REPAIRING:
        _spoil(state, worker)
        found = replace(found, action=RETRY, reason=f"{found.reason}; an earlier step is looked for")
    react(state, now, [WorkerFault(worker, found)], out, step=report.step)


def _spoil(state: ControlState, worker: Worker) -> None:
    """Record that the worker could not use its source for the step that was being restored."""
    recovery, repair = state.recovering(), state.repair
    assert repair is not None, "a step was being restored"
    step = repair.step
    recovery.spoiled.append(step)
    if worker.rank in repair.rebuilt or worker.rank in repair.lent:
        recovery.unbuildable.append(step)
    elif worker.rank is not None:
        recovery.unusable.setdefault(worker.rank, []).append(step)


def worker_suspects(state: ControlState, now: float, report: m.WorkerSuspects, out: Decisions) -> None:
    """Record the loss of a connection.

    Usually a report follows that the peer has died. The connection is blamed only if no such report arrives in time.
    """
    worker = state.workers.get(report.worker)
    if worker is None or worker.rank is None:
        out.add(f"ignored: {report.worker} holds no logical rank")
    elif report.epoch != state.epoch or state.phase not in EPOCH_OPEN:
        out.add(f"ignored: {report.worker} lost a connection of epoch {report.epoch}, which is over")
    elif report.worker in state.suspicions:
        out.add(f"ignored: {report.worker} has reported this before")
    else:
        state.suspicions[report.worker] = Suspicion(now, report)
        out.add(f"{report.worker} lost a connection of group {report.group}; a death would be heard of soon")


def lose_agent(state: ControlState, now: float, agent: Agent, why: str, out: Decisions) -> None:
    """Handle the loss of an agent: all workers of its node are lost together."""
    agent.gone = why
    state.spawning.pop(agent.node, None)
    here = [w for w in state.workers.values() if w.node == agent.node]
    kills = (m.Kill(w.name, why) for w in here)
    node = f"node {state.named(agent)}"
    out.add(f"{node} is lost with {len(here)} worker(s): {why}", m.GivenUp(agent.node, why), *kills)
    if state.phase == GATHERING and agent.places and not state.attached:
        ends.stop(state, now, 1, f"{node} was lost before training began: {why}", out)
        return
    if state.phase == GATHERING and agent.places and not here:
        ends.restart(state, now, f"{node} was lost before its workers had started: {why}", out)
        return
    found = verdict.of_lost_agent(state.named(agent), why)
    react(state, now, [WorkerFault(worker, found, dead=True) for worker in here], out)


def react(state: ControlState, now: float, faults: list[WorkerFault], out: Decisions, step: int | None = None) -> None:
    """Carry out the verdicts on one or several failures; the most severe action decides.

    ``step`` is the last committed step that the failed worker reported, or None if it reported none.
    """
    at = state.newest_step() if step is None else step
    judged = [_judge(state, now, fault, at) for fault in _spared(state, faults)]
    for fault in judged:  # after all verdicts: simultaneous failures must not count as repeated ones
        if fault.worker.rank is not None or state.phase == GATHERING:
            history.record(state.history, now, _rank_of(fault.worker), at, fault.verdict)
    for fault in judged:
        tell(state, fault, out)
    holders = [fault for fault in judged if fault.worker.rank is not None or state.phase == GATHERING]
    for fault in judged:
        remove(state, now, fault, out)
    if not holders:
        return
    worst = max((fault.verdict for fault in holders), key=lambda found: SEVERITY.index(found.action))
    if worst.category == verdict.STORAGE:
        ends.finish_unsaved(state, now, worst.reason, out)
    elif worst.action == STOP:
        code = verdict.USER_CODE if worst.category == verdict.USER else 1
        ends.stop(state, now, code, f"{_names(holders)}: {worst.reason}", out)
    elif worst.action == RESTART:
        ends.restart(state, now, f"{_names(holders)}: {worst.reason}", out)
    elif state.phase == GATHERING or (state.fresh and state.phase == RESUMING):
        reason = f"{_names(holders)}: {worst.reason}; no state is in memory yet"
        ends.restart(state, now, reason, out)
    else:
        _remove_those_who_left(state, now, out)
        ranks = sorted(fault.worker.rank for fault in holders if fault.worker.rank is not None)
        verdicts = _verdicts(state, holders)
        epochs.close(state, now, f"{_names(holders)}: {worst.reason}", ranks, out)
        under_way = state.recovering()
        under_way.verdicts += verdicts
        under_way.in_vain &= all(fault.verdict.in_vain for fault in holders)


# --- exits -----------------------------------------------------------------------------------------------------------


def _seated_exit(state: ControlState, now: float, worker: Worker, code: int, out: Decisions) -> None:
    if code == 0 and state.phase in EPOCH_OPEN and not (worker.empty and not worker.done):
        worker.left, worker.left_at = True, now
        out.add(f"{worker.name} (logical rank {worker.rank}) has ended with code 0; the others have to end as well")
        ends.finish_if_done(state, now, out)
        return
    found = history.weigh_findings(state, now, worker, verdict.of_exit(code))
    react(state, now, [WorkerFault(worker, found, dead=True)], out)


def _early_exit(state: ControlState, now: float, worker: Worker, code: int, out: Decisions) -> None:
    """Handle the exit of a worker before the first epoch of a fresh start has opened."""
    if not state.attached:
        ends.plain_exit(state, now, worker, code, out)
    elif code == 0:
        worker.left = True
        out.add(f"{worker.name} has ended with code 0 before training began")
        ends.finish_if_all_left(state, now, out)
    else:
        react(state, now, [WorkerFault(worker, verdict.of_exit(code), dead=True)], out)


def _standby_exit(state: ControlState, now: float, worker: Worker, code: int, out: Decisions) -> None:
    epochs.vacate(state, worker, now)
    how = verdict.of_exit(code).reason
    out.add(f"standby {worker.name} {how}" + ("" if worker.ready else " before it was ready"))
    out.note(events.WORKER_LOST, node=worker.node, worker=worker.name, reason=how)
    if worker.ready:
        return
    state.failed_starts += 1
    if state.failed_starts == epochs.MOST_FAILED_STARTS:
        out.add(f"{state.failed_starts} standbys in a row ended before they were ready: no further one is started")
    if state.phase == CLOSED and state.failed_starts >= epochs.MOST_FAILED_STARTS:
        ends.restart(state, now, f"no worker comes up for the empty seats: {worker.name} {how}", out)


# --- the parts of a reaction -----------------------------------------------------------------------------------------


def _spared(state: ControlState, faults: list[WorkerFault]) -> list[WorkerFault]:
    """Return the faults with verdicts that do not kill a worker together with all holders of the copy of its state.

    Such workers try again in place (RETRY): one that is only late can still hand its state on. If they do so in vain,
    the history of their failures replaces them.
    """
    doomed = {f.worker.rank for f in faults if f.verdict.action == REPLACE and not f.dead and not f.worker.empty}
    holders = (state.copies.get(rank) for rank in doomed if rank is not None)
    if len(doomed) < 2 or not any(ranks and doomed.issuperset(ranks) for ranks in holders):
        return faults

    def again(fault: WorkerFault) -> WorkerFault:
        return replace(fault, verdict=replace(fault.verdict, category=TRANSIENT, action=RETRY))

    return [again(fault) if fault.worker.rank in doomed else fault for fault in faults]


def _judge(state: ControlState, now: float, fault: WorkerFault, at: int) -> WorkerFault:
    """Return the fault with its verdict adjusted to earlier failures and to the options of the run."""
    worker, found = fault.worker, fault.verdict
    if worker.rank is None and state.phase != GATHERING:
        return fault
    if worker.empty and found.action == RESTART and found.category == SOFTWARE and state.phase in EPOCH_OPEN:
        found = verdict.raised(found, REPLACE, "it had only just taken the seat")  # the others are unaffected
    found = history.weigh(state.history, now, _rank_of(worker), at, found)
    if not state.options.hot_swap and found.action in (RETRY, REPLACE):
        found = verdict.raised(found, RESTART, "hot-swap is off")
    return WorkerFault(worker, found, fault.dead)


def _rank_of(worker: Worker) -> int | None:
    """Return the logical rank that the worker holds, or for which it was started."""
    return worker.rank if worker.rank is not None else worker.started_for


def tell(state: ControlState, fault: WorkerFault, out: Decisions) -> None:
    """Record the verdict on a failed worker."""
    worker, found = fault.worker, fault.verdict
    rank = _rank_of(worker)
    who = f"{worker.name} ({'a standby' if rank is None else f'logical rank {rank}'})"
    out.add(f"{who}: {found.category}: {found.reason} -> {found.action}")
    out.note(
        events.FAULT_DETECTED,
        epoch=max(state.epoch, 0),
        node=worker.node,
        worker=worker.name,
        rank=rank,
        step=state.newest_step(),
        category=found.category,
        action=found.action,
        reason=found.reason,
        signal=found.signal,
    )


def remove(state: ControlState, now: float, fault: WorkerFault, out: Decisions) -> None:
    """Remove a worker that a standby replaces. If its process still lives, kill it, so that it cannot come back."""
    worker, found = fault.worker, fault.verdict
    if found.action != REPLACE and worker.rank is not None:
        return
    agent = state.agents.get(worker.node)
    if found.node_suspect and agent is not None:
        agent.suspect = agent.suspect or found.reason
    if found.device_unusable and agent is not None and (worker.rank is not None or worker.keeps_device):
        devices.reject(state, agent, worker.local_rank, found.reason, out)
    if not fault.dead:
        out.add(f"{worker.name} is replaced and must not come back", m.Kill(worker.name, found.reason))
    epochs.vacate(state, worker, now)
    out.add(f"{worker.name} is lost")
    out.note(events.WORKER_LOST, node=worker.node, worker=worker.name, rank=worker.rank, reason=found.reason)


def _remove_those_who_left(state: ControlState, now: float, out: Decisions) -> None:
    """Remove the workers that have exited with code 0: they cannot take part in the recovery, so their seats must
    be filled.
    """
    for worker in state.seated():
        if worker.left:
            tell(state, WorkerFault(worker, verdict.of_exit(0), dead=True), out)
            remove(state, now, WorkerFault(worker, verdict.of_exit(0), dead=True), out)


def _verdicts(state: ControlState, faults: list[WorkerFault]) -> list[str]:
    """Return, in words, the verdicts and which logical ranks were waiting in which operation."""
    found = [f"{_names([fault])}: {fault.verdict.reason}" for fault in faults]
    waiting: dict[str, list[int]] = {}
    for rank, worker in state.by_rank().items():
        beat = state.beat(worker)
        if beat is not None and beat.epoch == state.epoch and beat.doing == "wait":
            waiting.setdefault(beat.where or "a group operation", []).append(rank)
    found += [f"logical rank(s) {', '.join(map(str, ranks))} waited in {where}" for where, ranks in waiting.items()]
    return found


def _names(faults: list[WorkerFault]) -> str:
    names = [
        f"{fault.worker.name} (logical rank {rank})" for fault in faults if (rank := _rank_of(fault.worker)) is not None
    ]
    return ", ".join(names[:4]) + (f" and {len(names) - 4} others" if len(names) > 4 else "")
