"""Epochs: closing one, filling the seats of the next, repair, resume (paper, section VI-D). One at a time."""

from ft import events
from ft import messages as m
from ft.control import invariants, life, sources
from ft.control.decision import Decision
from ft.control.membership import fill_seats
from ft.control.state import CLOSED, GATHERING, OPENED, REPAIRING, RUNNING, State
from ft.groups.plan import plan_rebuild


def close(state: State, now: float, reason: str, decision: Decision) -> None:
    """The epoch is over; ``advance`` opens the next one as soon as its seats can be filled."""
    state.suspicion = None
    if state.phase == CLOSED:
        return
    if state.phase in (OPENED, REPAIRING):
        decision.because(f"failure during the recovery of epoch {state.epoch}")
    decision.order(m.Close(state.epoch, reason))
    decision.event(events.EPOCH_CLOSED, epoch=state.epoch, reason=reason)
    state.standbys_asked = False
    limits = state.limits()
    _enter(state, CLOSED, now, now + limits.drain_s + limits.assemble_s)


def advance(state: State, now: float, decision: Decision) -> None:
    """Goes as far as what is known allows."""
    if state.phase == GATHERING:
        _gather(state, now, decision)
    if state.phase == CLOSED:
        _open(state, now, decision)
    if state.phase == OPENED:
        _order_repair(state, now, decision)
    if state.phase == REPAIRING:
        _order_resume(state, now, decision)
    if state.phase == RUNNING:
        _replenish(state, decision)


def worker_released(state: State, now: float, report: m.WorkerReleased, decision: Decision) -> None:
    worker = state.workers.get(report.worker)
    if worker is not None and report.epoch > worker.released:
        worker.released, worker.released_at = report.epoch, report.step
        worker.groups, worker.holdings = report.groups, report.holdings


def worker_arrived(state: State, now: float, report: m.WorkerArrived, decision: Decision) -> None:
    worker = state.workers.get(report.worker)
    if worker is not None and report.epoch == state.epoch and worker.arrived < report.epoch:
        worker.arrived, worker.groups, worker.holdings = report.epoch, report.groups, m.Holdings()
        decision.event(
            events.JOINER_ARRIVED,
            epoch=state.epoch,
            worker=worker.name,
            node=worker.node,
            rank=state.rank_of(worker.name),
        )


def worker_repaired(state: State, now: float, report: m.WorkerRepaired, decision: Decision) -> None:
    worker = state.workers.get(report.worker)
    if worker is not None and report.epoch == state.epoch and state.phase == REPAIRING:
        worker.repaired = report


def worker_resumed(state: State, now: float, report: m.WorkerResumed, decision: Decision) -> None:
    worker = state.workers.get(report.worker)
    if worker is None or report.epoch != state.epoch or worker.resumed >= report.epoch:
        return
    worker.resumed = report.epoch
    if state.phase == RUNNING and all(state.workers[n].resumed >= state.epoch for n in state.seats.values()):
        decision.event(events.RESUMED, epoch=state.epoch, step=report.step)
        state.step = report.step
        state.recovering = False


def restart(state: State, now: float, reason: str, decision: Decision) -> None:
    """Warm restart of everything from the last persistent checkpoint (paper: external fallback)."""
    if state.restarts >= state.options.max_restarts:
        decision.because(f"{reason}; {state.restarts} warm restarts are all that --max-restarts allows")
        life.stop(
            state, 1, f"{reason}\n  after {state.restarts} warm restart(s) the run ends (--max-restarts)", decision
        )
        return
    state.restarts += 1
    healthy = [a for a in sorted(state.agents.values(), key=lambda a: a.node_rank) if not a.suspect]
    ranks = _place_ranks(healthy, state.options.world_size)
    if ranks is None:
        life.stop(
            state,
            1,
            f"{reason}\n  and the nodes that are left cannot hold {state.options.world_size} workers",
            decision,
        )
        return
    decision.because(f"warm restart {state.restarts}: {reason}")
    if state.phase in (RUNNING, OPENED, REPAIRING):
        decision.order(m.Close(state.epoch, reason))
    decision.order(m.Restart(state.restarts, reason, ranks))
    decision.event(events.RESTARTED, number=state.restarts, reason=reason)
    for worker in state.workers.values():
        worker.killed = True
    state.workers = {name: w for name, w in state.workers.items() if w.exit_code is None}
    state.seats, state.beats, state.fresh_ranks = {}, {}, ranks
    state.dp_peers, state.shards, state.empty = {}, {}, set()
    state.standbys_asked, state.suspicion, state.spawning = False, None, 0
    _enter(state, GATHERING, now, now + state.options.timeouts.join_s)


def _gather(state: State, now: float, decision: Decision) -> None:
    """A fresh start: when every logical rank has a ready worker, the epoch opens."""
    ready = {w.rank: w for w in state.workers.values() if w.rank is not None and w.ready and w.lives}
    if len(ready) < state.options.world_size:
        if state.deadline is not None and now > state.deadline and state.protected:
            life.stop(
                state,
                1,
                f"{len(ready)} of {state.options.world_size} workers came within {state.options.timeouts.join_s:g} s",
                decision,
            )
        return
    for worker in ready.values():
        ranks = state.fresh_ranks.get(worker.node, [])
        worker.local_rank = ranks.index(worker.rank) if worker.rank in ranks else 0
    state.previous = {}
    state.seats = {rank: worker.name for rank, worker in sorted(ready.items())}
    _open_epoch(state, now, sorted(state.seats), True, decision.because("every logical rank has a worker"))
    _enter(state, RUNNING, now, None)
    state.recovering = True


def _open(state: State, now: float, decision: Decision) -> None:
    filled = fill_seats(state)
    for node, count in filled.spawn.items():
        decision.order(m.Spawn(node, count))
        decision.because(f"no standby is ready: starting {count} on {node}")
        state.spawning += count
    if filled.impossible:
        restart(state, now, filled.impossible, decision)
        return
    if filled.seats is None:
        if state.deadline is not None and now > state.deadline:
            restart(state, now, "no worker came for the empty seats in time", decision)
        return
    for rank, (worker, local_rank) in filled.moves.items():
        state.workers[worker].local_rank = local_rank
        decision.because(f"{worker} takes logical rank {rank}")
    state.previous, state.seats = dict(state.seats), filled.seats
    joiners = sorted(set(filled.moves) | state.empty)
    _open_epoch(state, now, joiners, False, decision)
    limits = state.limits()
    _enter(state, OPENED, now, now + limits.drain_s)


def _open_epoch(state: State, now: float, joiners: list[int], fresh: bool, decision: Decision) -> None:
    state.epoch += 1
    state.joiners = set(joiners)
    state.empty = set() if fresh else set(joiners)
    state.reported_release = False
    seats = {}
    for rank, name in sorted(state.seats.items()):
        worker = state.workers[name]
        worker.repaired, worker.done = None, False
        seats[str(rank)] = m.Seat(name, worker.node, worker.address, worker.local_rank)
    decision.order(m.Open(state.epoch, seats, [] if fresh else joiners, fresh, list(state.fired)))
    decision.event(
        events.EPOCH_OPENED,
        epoch=state.epoch,
        seats={r: s.worker for r, s in seats.items()},
        joiners=[] if fresh else joiners,
        fresh=fresh,
    )


def _order_repair(state: State, now: float, decision: Decision) -> None:
    closed = state.epoch - 1
    survivors = [n for r, n in state.seats.items() if r not in state.joiners]
    waiting = [n for n in survivors if state.workers[n].released < closed]
    if not waiting and not state.reported_release:
        state.reported_release = True
        steps = [state.workers[name].released_at for name in survivors]
        decision.event(events.RELEASED, epoch=closed, steps=steps)
    late = [state.seats[r] for r in state.joiners if state.workers[state.seats[r]].arrived < state.epoch]
    limits = state.limits()
    if waiting or late:
        overdue = waiting if now > state.since + limits.drain_s else []
        overdue = overdue or (late if now > state.since + limits.assemble_s else [])
        _replace_overdue(
            state, now, overdue, "did not leave the closed epoch" if waiting else "did not assemble", decision
        )
        return
    held = {r: state.workers[n].holdings for r, n in state.seats.items() if r not in state.joiners}
    step, found, why = sources.choose(state.seats, held, state.dp_peers)
    if step is None:
        restart(state, now, f"both copies lost: {why}", decision)
        return
    plan = plan_rebuild({r: state.workers[n].groups for r, n in state.seats.items()}, state.joiners)
    state.repair = m.Repair(
        state.epoch, step, sorted(plan.rebuild), sorted(plan.defer), {str(r): s for r, s in found.items()}
    )
    state.kept = len(plan.keep)
    decision.order(state.repair)
    decision.because(
        f"step {step} is the newest of which every logical rank has a source; {len(plan.rebuild)} groups are "
        f"rebuilt, {len(plan.keep)} kept, {len(plan.defer)} deferred"
    )
    decision.event(events.REPAIR_ORDERED, epoch=state.epoch, step=step)
    _enter(state, REPAIRING, now, now + limits.repair_s)


def _order_resume(state: State, now: float, decision: Decision) -> None:
    reports = {r: state.workers[n].repaired for r, n in state.seats.items()}
    missing = [state.seats[r] for r, report in reports.items() if report is None]
    if missing:
        if now > state.deadline:
            _replace_overdue(state, now, missing, "did not repair in time", decision)
        return
    decision.event(
        events.GROUPS_REBUILT,
        epoch=state.epoch,
        rebuilt=len(state.repair.rebuild),
        kept=state.kept,
        deferred=len(state.repair.defer),
        seconds=max(r.rebuild_s for r in reports.values()),
    )
    decision.event(
        events.STATE_RESTORED,
        epoch=state.epoch,
        step=state.repair.step,
        sources={str(r): report.sources.get("owned", "") for r, report in reports.items()},
        seconds=max(r.restore_s for r in reports.values()),
    )
    broken = invariants.violations(state.repair, reports, state.shards)
    decision.event(events.INVARIANTS_CHECKED, epoch=state.epoch, violations=broken)
    if broken:
        decision.because("an invariant is violated")
        life.stop(state, 1, "the recovery would have broken the run:\n  " + "\n  ".join(broken), decision)
        return
    decision.order(m.Resume(state.epoch, state.repair.step))
    decision.because("all are repaired and the invariants hold")
    state.empty, state.recovering, state.step = set(), True, state.repair.step
    _enter(state, RUNNING, now, None)


def _replace_overdue(state: State, now: float, names: list[str], what: str, decision: Decision) -> None:
    for name in names:
        worker = state.workers[name]
        rank = state.rank_of(name)
        worker.killed = True
        decision.order(m.Kill(name, what))
        decision.because(f"{name} {what}")
        decision.event(
            events.FAULT_DETECTED,
            epoch=state.epoch,
            worker=name,
            node=worker.node,
            rank=rank,
            step=state.step,
            category="host fault",
            action="replace",
            reason=f"{what} in time",
            signal="deadline",
        )
    if names:
        close(state, now, f"{names[0]} {what} in time", decision)
        advance(state, now, decision)


def _replenish(state: State, decision: Decision) -> None:
    """Standbys are started when training runs, so that they do not compete with a start or a recovery."""
    if state.recovering or state.standbys_asked or not state.protected:
        return
    state.standbys_asked = True
    for agent in state.agents.values():
        seated = set(state.seats.values())
        here = [w for w in state.workers.values() if w.node == agent.node and w.lives and w.name not in seated]
        lacking = agent.standbys - len(here)
        if lacking > 0 and not agent.suspect:
            decision.order(m.Spawn(agent.node, lacking))
            state.spawning += lacking
            decision.because(f"{agent.node} has {len(here)} of {agent.standbys} standbys")


def _place_ranks(agents: list, world_size: int) -> dict[str, list[int]] | None:
    """Logical ranks for each node of a restart: as at the start, lost nodes' ranks on standby nodes."""
    ranks, next_rank = {}, 0
    for agent in agents:
        count = min(agent.seats or agent.standbys, world_size - next_rank)
        ranks[agent.node] = list(range(next_rank, next_rank + count))
        next_rank += count
    return ranks if next_rank == world_size else None


def _enter(state: State, phase: str, now: float, deadline: float | None) -> None:
    state.phase, state.since, state.deadline = phase, now, deadline
