"""The sequence of a recovery: close the epoch, fill the empty seats, open the next epoch, repair, resume.

This is the recovery of DEADPOOL, section VI-D.
"""

from ft.base import events
from ft.job import messages as m
from ft.job.control import devices, history, membership, recovery, repairs
from ft.job.control import run_ends as ends
from ft.job.control.repairs import plan_rebuild
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
    RecoveryInProgress,
    Vacancy,
    Worker,
)
from ft.job.parts import Seat

MOST_FAILED_STARTS = 3
"""After so many standbys in a row that ended before they were ready, no further standby is started."""


def vacate(state: ControlState, worker: Worker, now: float) -> None:
    """Forget a lost worker, and mark its seat as empty if it had one. ``now``: the present time, in seconds."""
    devices.hold(state, worker, now)
    state.workers.pop(worker.name, None)
    state.suspicions.pop(worker.name, None)
    if worker.rank is not None and state.seats.get(worker.rank) == worker.name:
        del state.seats[worker.rank]
        state.vacant[worker.rank] = Vacancy(worker.name, worker.node, worker.local_rank)


def close(state: ControlState, now: float, reason: str, ranks: list[int], out: Decisions) -> None:
    """Close the epoch if it is open, and record the failed logical ranks in the recovery in progress."""
    if state.recovery is None:
        state.recovery = RecoveryInProgress(now, state.epoch, reason)
    state.recovery.ranks += [rank for rank in ranks if rank not in state.recovery.ranks]
    if state.phase not in EPOCH_OPEN:
        return
    during = "" if state.phase == RUNNING else f"; a failure while {state.phase}"
    out.add(f"epoch {state.epoch} ends: {reason}{during}", m.Close(state.epoch, reason))
    out.note(events.EPOCH_CLOSED, epoch=state.epoch, reason=reason)
    state.suspicions, state.repair, state.recovery.released = {}, None, False
    for worker in state.seated():
        worker.leaving_epoch, worker.repaired, worker.done, worker.inherited = state.epoch, None, False, None
    state.enter(CLOSED, now)


def advance(state: ControlState, now: float, out: Decisions) -> None:
    """Go through as many phases as the received reports allow."""
    if state.phase == GATHERING and (why := devices.crowded(state)):
        ends.restart(state, now, why, out)
    elif state.phase == GATHERING:
        _open_fresh(state, now, out)
    if state.phase == CLOSED:
        _fill(state, now, out)
    if state.phase == OPENED:
        _order_repair(state, now, out)
    if state.phase == REPAIRING:
        _order_resume(state, now, out)
    if state.phase == RESUMING:
        _begin_running(state, now, out)
    if state.phase == RUNNING:
        ends.finish_if_done(state, now, out)
    if state.phase == RUNNING:
        _replenish(state, now, out)
        _reserve(state, out)


# --- seats -----------------------------------------------------------------------------------------------------------


def _open_fresh(state: ControlState, now: float, out: Decisions) -> None:
    """Open the first epoch of a fresh start once every logical rank has a ready worker."""
    ready = {w.started_for: w for w in state.workers.values() if w.started_for is not None and w.ready and not w.left}
    if len(ready) < state.options.world_size or state.nodes_seen() < state.options.nodes:
        return
    for rank, worker in ready.items():
        worker.rank, worker.empty, worker.assembled = rank, False, True
    state.seats = {rank: worker.name for rank, worker in sorted(ready.items())}
    _open(state, [], True, "every logical rank has a worker", out)
    state.enter(RESUMING, now)


def _fill(state: ControlState, now: float, out: Decisions) -> None:
    filling = membership.fill(state)
    if filling.impossible:
        ends.restart(state, now, filling.impossible, out)
        return
    if filling.spawn:
        out.add("; ".join(filling.reasons), *(m.Spawn(node, count) for node, count in sorted(filling.spawn.items())))
        for node, count in filling.spawn.items():
            state.spawning.setdefault(node, []).extend([now] * count)
    if filling.lacking:
        awaited = state.recovering().awaited
        awaited += [rank for rank in filling.lacking if rank not in awaited]
        return
    for rank, (name, local_rank) in filling.moves.items():
        worker = state.workers[name]
        worker.rank, worker.local_rank, worker.empty, worker.assembled = rank, local_rank, True, False
        worker.keeps_device = False
        state.seats[rank] = name
    state.vacant = {}
    joiners = [rank for rank, worker in state.by_rank().items() if worker.empty]
    _open(state, joiners, False, "; ".join(filling.reasons) or "everybody keeps the seat", out)
    state.enter(OPENED, now)


def _open(state: ControlState, joiners: list[int], fresh: bool, reason: str, out: Decisions) -> None:
    state.epoch, state.fresh = state.epoch + 1, fresh
    seats = {}
    for rank, worker in state.by_rank().items():
        worker.repaired, worker.done = None, False
        domains = dict(state.agents[worker.node].joined.domains)
        seats[rank] = Seat(worker.name, worker.node, worker.address, worker.local_rank, domains)
    host = state.agents[state.seated()[0].node]  # the rendezvous store has to be on a node of the epoch's workers
    copies = {rank: state.copies[rank] for rank in joiners if rank in state.copies}
    address = host.joined.rendezvous_address
    order = m.Open(state.epoch, seats, list(joiners), fresh, list(state.fired), address, copies)
    out.add(f"epoch {state.epoch} opens: {reason}", order)
    named = {str(rank): seat.worker for rank, seat in seats.items()}
    out.note(events.EPOCH_OPENED, epoch=state.epoch, seats=named, joiners=list(joiners), fresh=fresh)


def _replenish(state: ControlState, now: float, out: Decisions) -> None:
    """Order missing standbys, but only while training runs: their start must not compete with a start or a recovery."""
    if state.failed_starts >= MOST_FAILED_STARTS or not state.options.hot_swap:
        return
    wanted = membership.replenish(state)
    if wanted:
        lacks = ", ".join(f"{node} lacks {count} standby(s)" for node, count in sorted(wanted.items()))
        out.add(lacks, *(m.Spawn(node, count) for node, count in sorted(wanted.items())))
        for node, count in wanted.items():
            state.spawning.setdefault(node, []).extend([now] * count)


def _reserve(state: ControlState, out: Decisions) -> None:
    """Tell new standbys how much memory a logical rank needs; the start of the others is over by now."""
    told = [worker for worker in state.standbys() if not worker.reserved]
    if not told or not any(state.footprint):
        return
    for worker in told:
        worker.reserved = True
    heap, snapshot = state.footprint
    names = ", ".join(worker.name for worker in told)
    kept = devices.keep(state, told)
    said = "".join(f"; {name} makes device {device} ready" for name, device in kept.items())
    order = m.Reserve(heap, snapshot, kept)
    out.add(f"{names}: touch the memory of a logical rank, {heap + snapshot >> 20} MiB{said}", order)


# --- repair ----------------------------------------------------------------------------------------------------------


def _order_repair(state: ControlState, now: float, out: Decisions) -> None:
    seated, under_way = state.seated(), state.recovering()
    if any(w.leaving_epoch >= 0 for w in seated):
        return
    if not under_way.released:
        under_way.released = True
        steps = [w.release.step for w in seated if w.release is not None and not w.empty]
        out.add("the last survivor has left the closed epoch")
        out.note(events.RELEASED, epoch=state.epoch - 1, steps=steps)
    if any(not w.assembled for w in seated):
        return
    found = recovery.decide(recovery.of_memory(state))
    chosen = found.plan
    if chosen is None or chosen.step is None:
        ends.descend(state, now, found, out)
        return
    state.returns = history.returned(state.returns, chosen.step, under_way, len(state.fired))
    if message := history.going_round(state.returns):
        ends.stop(state, now, 1, message, out)
        return
    under_way.verdicts, under_way.in_vain = [], True
    held = state.by_rank()
    empty = [rank for rank, w in held.items() if w.empty]
    last = {rank: w.arrived if w.empty or w.release is None else w.release for rank, w in held.items()}
    groups = {rank: report.groups if report is not None else [] for rank, report in last.items()}
    plan = plan_rebuild(groups, empty)
    state.repair = m.Repair(
        state.epoch,
        chosen.step,
        list(plan.rebuild),
        list(plan.defer),
        sources=dict(sorted(chosen.sources.items())),
        copies=dict(sorted(state.copies.items())),
        rebuilt=dict(sorted(chosen.rebuilt.items())),
        lent=dict(sorted(chosen.lent.items())),
        position_of=chosen.position_of,
        live=[] if chosen.rebuilt or chosen.lent else _live(state, chosen.step),
    )
    state.rebuilt |= dict.fromkeys((state.places[rank].pp for rank in chosen.rebuilt), chosen.step)
    state.kept = len(plan.keep)
    out.add(
        f"all are there; {chosen.reason}; of the groups "
        f"{len(plan.rebuild)} are rebuilt, {len(plan.defer)} deferred, {len(plan.keep)} kept",
        state.repair,
    )
    out.note(events.REPAIR_ORDERED, epoch=state.epoch, step=chosen.step, level=found.level)
    state.enter(REPAIRING, now)


def _live(state: ControlState, step: int) -> list[int]:
    """Return the logical ranks whose models still hold the weights of ``step``: no later step has changed them."""
    found = ((rank, w.release) for rank, w in state.by_rank().items() if not w.empty)
    return [rank for rank, release in found if release is not None and release.holdings.live == step]


def _order_resume(state: ControlState, now: float, out: Decisions) -> None:
    reports = {rank: worker.repaired for rank, worker in state.by_rank().items() if worker.repaired is not None}
    epoch, repair = state.epoch, state.repair
    if repair is None or len(reports) < len(state.seats):
        return
    broken = repairs.violations(repair, reports, state.shards)
    said = "; ".join(broken)
    out.add(f"all are repaired; the invariants are violated: {said}" if broken else "all are repaired; I1 to I4 hold")
    out.note(
        events.GROUPS_REBUILT,
        epoch=epoch,
        rebuilt=len(repair.rebuild),
        kept=state.kept,
        deferred=len(repair.defer),
        seconds=max(r.rebuild_s for r in reports.values()),
    )
    out.note(
        events.STATE_RESTORED,
        epoch=epoch,
        step=repair.step,
        sources={str(r): report.sources.get("owned", "") for r, report in sorted(reports.items())},
        replicated={str(r): report.sources.get("replicated", "") for r, report in sorted(reports.items())},
        seconds=max(r.restore_s for r in reports.values()),
    )
    out.note(events.INVARIANTS_CHECKED, epoch=epoch, violations=broken)
    if broken:
        message = "going on would have spoiled the run, an invariant is violated:\n  " + "\n  ".join(broken)
        ends.stop(state, now, 1, message, out)
        return
    for worker in state.seated():
        worker.empty = False
    state.step = repair.step
    out.add("the invariants hold", m.Resume(epoch, repair.step))
    state.enter(RESUMING, now)


def _begin_running(state: ControlState, now: float, out: Decisions) -> None:
    if any(w.resumed < state.epoch for w in state.seated()) or len(state.seats) < state.options.world_size:
        ends.finish_if_done(state, now, out)
        return
    out.add(f"the first step of epoch {state.epoch} has begun everywhere").note(
        events.RESUMED, epoch=state.epoch, step=state.step
    )
    done = state.recovery
    if done is not None:
        state.last_recovery = {"reason": done.reason, "at": done.at, "seconds": round(now - done.at, 4)}
        state.last_recovery |= {"outcome": "recovered", "closed": done.closed, "epoch": state.epoch}
    state.recovery = None
    state.enter(RUNNING, now)
