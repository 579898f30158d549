"""Decisions of the control plane that follow from the passing of time, and the time of the next check.

A suspicion is a worker's report that a connection to other workers failed. The usual cause is the death of a worker,
which is reported separately and soon; otherwise the connection itself is the fault.
"""

from dataclasses import replace

from ft.faults import verdict
from ft.faults.verdict import RETRY
from ft.job import messages as m
from ft.job.control import devices, epochs, inspections, liveness, start_checks
from ft.job.control import run_ends as ends
from ft.job.control.failures import WorkerFault, lose_agent, react
from ft.job.control.history import MOST_RETRIES, WINDOW_S
from ft.job.control.liveness import Culprit, WorkerView
from ft.job.control.state import (
    CLOSED,
    EPOCH_OPEN,
    GATHERING,
    OPENED,
    REPAIRING,
    RESUMING,
    RUNNING,
    ControlState,
    Decisions,
    Worker,
)
from ft.job.control.timeouts import Timeouts

_JUST_AFTER_S = 0.001
"""Seconds after a deadline at which it is checked: a deadline has passed only when more than its time has passed."""


def judge(state: ControlState, now: float, out: Decisions) -> None:
    """React to the first kind of deadline that has passed; leave the state as it is if none has."""
    for check in (_agents, _told_to_end, _start, _spawned, devices.overdue, _phase, _suspicions, _stalls, _left):
        before = len(out)
        check(state, now, out)
        if len(out) > before:
            return


def following(state: ControlState, now: float) -> float:
    """Return the next time at which ``judge`` may find a deadline that has passed."""
    limits = state.limits()
    moments = [now + limits.agent_beat_s]  # liveness is checked at the rate at which heartbeats arrive
    moments += [s.since + limits.suspicion_s for s in state.suspicions.values()]
    moments += [hold.since + limits.device_s for agent in state.agents.values() for hold in agent.held.values()]
    if state.phase == OPENED:
        moments += [state.since + limits.drain_s, state.since + limits.assemble_s]
    if state.phase == REPAIRING or (state.phase == RESUMING and not state.fresh):
        moments.append(state.since + limits.repair_s)
    return min(moment + _JUST_AFTER_S for moment in moments if moment + _JUST_AFTER_S > now)


def _agents(state: ControlState, now: float, out: Decisions) -> None:
    """Handle the loss of an agent of which nothing was heard for too long; the next call handles a further one."""
    heard = {agent.node: agent.heard_at for agent in state.agents.values() if not agent.gone}
    lost = liveness.lost_agents(now, heard, state.options.timeouts)
    if lost:
        node, seconds = lost[0]
        lose_agent(state, now, state.agents[node], f"nothing was heard of its agent for {seconds:.1f} s", out)


def _told_to_end(state: ControlState, now: float, out: Decisions) -> None:
    """End a run that was told to end if its workers get nowhere. A recovery has limits of its own."""
    if state.told_at is None or state.phase not in (RUNNING, RESUMING):
        return
    quiet_s = min(now - max(state.told_at, state.since), liveness.quiet_s(_views(state, now), state.options.timeouts))
    if quiet_s > state.limits().exit_s:
        ends.give_up(state, now, quiet_s, out)


def _start(state: ControlState, now: float, out: Decisions) -> None:
    """End or restart the run if agents, or the workers of a fresh start, are missing for too long."""
    limit = state.options.timeouts.join_s
    start_checks.notice(state, now, out)
    if state.phase != GATHERING or not state.agents or now <= state.since + limit:
        return
    nodes, world = state.options.nodes, state.options.world_size
    if state.nodes_seen() < nodes:
        message = f"{state.nodes_seen()} of {nodes} agents came within {limit:g} s: {', '.join(sorted(state.agents))}"
        ends.stop(state, now, 1, message, out)
    elif state.attached:
        ready = sorted({w.started_for for w in state.workers.values() if w.started_for is not None and w.ready})
        missing = [str(rank) for rank in range(world) if rank not in ready]
        ends.restart(state, now, f"logical rank(s) {', '.join(missing)} were not ready within {limit:g} s", out)
    elif absent := sorted(set(range(world)) - {w.started_for for w in state.workers.values()}):
        ranks = ", ".join(map(str, absent))
        ends.stop(state, now, 1, f"the worker(s) for logical rank(s) {ranks} were not started within {limit:g} s", out)


def _spawned(state: ControlState, now: float, out: Decisions) -> None:
    """Handle workers that were ordered or started but do not become ready in time."""
    limit = state.options.timeouts.ready_s
    for node, times in state.spawning.items():
        overdue = [at for at in times if now > at + limit]
        if overdue:
            state.spawning[node] = [at for at in times if at not in overdue]
            state.failed_starts += len(overdue)
            out.add(f"{len(overdue)} worker(s) ordered on {node} were not started within {limit:g} s")
    late = [w for w in state.workers.values() if w.started_for is None and not w.ready and now > w.since + limit]
    for worker in late:
        state.failed_starts += 1
        epochs.vacate(state, worker, now)
        reason = f"not ready within {limit:g} s"
        out.add(f"standby {worker.name} was {reason}", m.Kill(worker.name, reason))
    if len(out) and state.phase == CLOSED and state.failed_starts >= epochs.MOST_FAILED_STARTS:
        ends.restart(state, now, "no worker comes up for the empty seats", out)


def _phase(state: ControlState, now: float, out: Decisions) -> None:
    """React to workers that delay the present phase of a recovery."""
    limits, passed = state.limits(), now - state.since
    seated = state.seated()
    if state.phase == CLOSED and passed > limits.ready_s + limits.drain_s:
        ends.restart(state, now, "no worker came for the empty seats", out)
    elif state.phase == OPENED:
        leaving = [w for w in seated if w.leaving_epoch >= 0] if passed > limits.drain_s else []
        coming = [w for w in seated if not w.assembled] if passed > limits.assemble_s else []
        _late(state, now, leaving, "it has not left the closed epoch", limits.drain_s, out)
        if not leaving:
            _late(state, now, coming, "it has not assembled itself", limits.assemble_s, out)
    elif state.phase == REPAIRING and passed > limits.repair_s:
        missing = [w for w in seated if w.repaired is None]
        _late(state, now, missing, "it is not repaired", limits.repair_s, out, together=True)
    elif state.phase == RESUMING and not state.fresh and passed > limits.repair_s:
        missing = [w for w in seated if w.resumed < state.epoch]
        _late(state, now, missing, "it has not begun its first step", limits.repair_s, out, together=True)
    elif state.phase == RESUMING and passed > limits.start_s:
        # A first step may take any time, but hangs are detected only after all workers have joined the epoch.
        absent = [w for w in seated if not w.left and _epoch_of(state, w) != state.epoch]
        _late(state, now, absent, "it has not taken its seat", limits.start_s, out)


def _epoch_of(state: ControlState, worker: Worker) -> int | None:
    """Return the epoch that the worker reported in its last heartbeat."""
    beat = state.beat(worker)
    return beat.epoch if beat is not None else None


def _late(
    state: ControlState,
    now: float,
    late: list[Worker],
    what: str,
    limit_s: float,
    out: Decisions,
    together: bool = False,
) -> None:
    """Replace the workers that are late.

    ``together``: whether one late worker can delay all others. If that is so and more than half of the workers are
    late, the worker at fault cannot be determined; then all workers keep their seats and try again (RETRY).
    """
    if not late:
        return
    action = RETRY if together and 2 * len(late) > len(state.seats) else verdict.REPLACE
    inspections.order(state, now, f"{late[0].name}: {what}", out)
    found = verdict.of_lateness(what, limit_s, action)
    react(state, now, [WorkerFault(worker, found) for worker in late], out)


def _suspicions(state: ControlState, now: float, out: Decisions) -> None:
    """React to a lost connection that no death of a worker has explained in time."""
    if state.phase not in EPOCH_OPEN or not state.suspicions:
        return
    name, first = min(state.suspicions.items(), key=lambda item: item[1].since)
    if now <= first.since + state.options.timeouts.suspicion_s:
        return
    worker = max((state.workers[n] for n in state.suspicions), key=lambda w: _retries(state, now, w))
    said = state.suspicions[worker.name].said
    inspections.order(state, now, f"{worker.name} lost a connection of group {said.group}", out)
    out.add(f"nobody has died within {state.options.timeouts.suspicion_s:g} s of the lost connection of {name}")
    react(state, now, [WorkerFault(worker, verdict.of_suspicion(said.group, said.message))], out)


def _retries(state: ControlState, now: float, worker: Worker) -> int:
    """Return how often the worker's rank was recently retried in place.

    Among workers that suspect each other's connection, the one with the most retries is the most likely cause.
    """
    recent = [i for i in state.history if i.rank == worker.rank and i.action == RETRY and now - i.at < WINDOW_S]
    return min(len(recent), MOST_RETRIES)


def _stalls(state: ControlState, now: float, out: Decisions) -> None:
    """React to workers that make no progress although they send heartbeats.

    Workers that do not communicate while others wait for them are at fault (a stall), unless an inspection shows that
    they wait, too. If all workers wait in communication (a standstill), every worker retries: what they wait for can go
    on in place, and a worker that hangs does not leave the closed epoch, and is replaced for that. A worker is not
    judged while its agent is silent: its progress cannot be reported.
    """
    contact_s = state.options.timeouts.contact_s
    if any(devices.is_silent(state.agents[worker.node], now, contact_s) for worker in state.seated()):
        return
    views, timeouts = _views(state, now), state.options.timeouts
    if state.phase not in (RUNNING, RESUMING) or not _have_all_begun(state, views):
        return
    stalled, waiting = liveness.stalled(views, timeouts), liveness.at_a_standstill(views, timeouts)
    endless = [] if stalled or waiting else liveness.endless(views, timeouts)
    if not (culprits := stalled or waiting or endless):
        _look_ahead(state, now, views, timeouts, out)
        return
    one = culprits[0]
    inspections.order(
        state, now, f"{one.worker} in {one.where} for {one.since_s:.1f} s (limit {one.limit_s:.1f} s)", out
    )
    if inspections.is_awaited(state, now):
        return
    found = inspections.finding(state)
    guilty = [c for c in stalled or endless if not inspections.waits(found, state.workers[c.worker].rank)]
    workers = [state.workers[c.worker] for c in guilty]
    if guilty and stalled:
        verdicts = [verdict.of_stall(c.where, c.since_s, c.limit_s) for c in guilty]
        react(state, now, [WorkerFault(*both) for both in zip(workers, verdicts, strict=True)], out)
    elif guilty:
        _late(state, now, workers, "its step has not ended", max(c.limit_s for c in guilty), out, together=True)
    elif waiting or not _is_at_work(state, views):
        _all_wait(state, now, views, culprits, out)


def _views(state: ControlState, now: float) -> dict[str, WorkerView]:
    """Return what the heartbeats of the workers say that have seats and have not left."""
    return {
        worker.name: WorkerView(beat, now - state.agents[worker.node].heard_at, worker.done)
        for worker in state.seated()
        if not worker.left and (beat := state.beat(worker)) is not None
    }


def _have_all_begun(state: ControlState, views: dict[str, WorkerView]) -> bool:
    """Return whether all workers have sent heartbeats of the present epoch, in which training is under way."""
    is_complete = all(worker.name in views for worker in state.seated() if not worker.left)
    return is_complete and all(view.beat.epoch == state.epoch for view in views.values())


def _is_at_work(state: ControlState, views: dict[str, WorkerView]) -> bool:
    """Return whether a worker that the inspection names as busy also computes according to its heartbeats. The limit on
    the duration of its step then applies to it.
    """
    named = [views.get(state.seats.get(rank, "")) for rank in inspections.at_work(inspections.finding(state))]
    return any(view is not None and not view.waits(state.options.timeouts) for view in named)


def _all_wait(
    state: ControlState, now: float, views: dict[str, WorkerView], culprits: list[Culprit], out: Decisions
) -> None:
    """Let all workers try again in place, because they all wait; the fault is that of the rank that the inspection
    names."""
    found = inspections.finding(state)
    causes = found.causes if found is not None else []
    named = [(state.seats[rank], cause.why) for cause in causes for rank in cause.ranks if rank in state.seats]
    name, why = next((one for one in named if one[0] in views), (culprits[0].worker, ""))
    said = verdict.of_standstill(views[name].beat.where, views[name].since_s, culprits[0].limit_s, why)
    react(state, now, [WorkerFault(state.workers[name], said)], out)


def _look_ahead(
    state: ControlState, now: float, views: dict[str, WorkerView], timeouts: Timeouts, out: Decisions
) -> None:
    """Ask all workers what they are doing if a time limit is about to pass: those that hang are killed after it."""
    later = {name: replace(view, age_s=view.age_s + inspections.LEAD_S) for name, view in views.items()}
    for kind in (liveness.stalled, liveness.at_a_standstill, liveness.endless):
        if culprits := kind(later, timeouts):
            one = culprits[0]
            inspections.order(state, now, f"{one.worker} in {one.where} for {one.since_s:.1f} s", out)
            return


def _left(state: ControlState, now: float, out: Decisions) -> None:
    """Replace workers that exited with code 0 while others continue training."""
    if state.phase not in EPOCH_OPEN:
        return
    limit = state.limits().leave_s
    gone = [w for w in state.seated() if w.left and now > w.left_at + limit]
    if gone:
        react(state, now, [WorkerFault(worker, verdict.of_exit(0), dead=True) for worker in gone], out)
