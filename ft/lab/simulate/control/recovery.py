"""Model of a worker's recovery between two epochs (``ft.systems.hot_swap.recovery``), for ``ft simulate control``.

An epoch is a version of the map from logical ranks to workers. After a failure the control plane closes the epoch. Each
worker then leaves its collectives, reports the snapshots it holds, waits for the next epoch, rebuilds process groups,
restores the ordered step, and resumes training.

The functions are generators, parts of the worker's training thread. They yield the seconds for which the thread is
busy, or None to wait for the next event.
"""

from collections.abc import Generator
from typing import TYPE_CHECKING, Any

from ft.job import messages as m
from ft.lab.simulate.control.errors import Broken, EpochClosed

if TYPE_CHECKING:
    from ft.lab.simulate.control.worker import Worker


def recover(worker: "Worker") -> Generator[float | None, None, Any]:
    """Bring the worker from a closed epoch, or from its start as a replacement, to the first step of an open epoch.

    Begins again if the epoch is closed meanwhile, or if the recovery fails.
    """
    while True:
        worker.step_began = None
        worker.does("idle", "recovery")
        try:
            if worker.closed:
                yield from _leave(worker)
            order = yield from _enter(worker)
            yield from _repair(worker, order)
            yield from worker.await_order(m.Resume)
        except EpochClosed:
            continue
        except Broken as error:
            yield from worker.fails(error)
            continue
        worker.resumes()
        return


def _leave(worker: "Worker") -> Generator[float | None, None, Any]:
    """Leave the closed epoch: report the snapshots held and the state of the process groups, and await the next one."""
    cluster = worker.cluster
    yield max(0.0, worker.snapshots.copied_at - cluster.time.now) + cluster.rng.uniform(*cluster.habits.leave_s)
    if worker.fence is not None and worker.rank not in worker.fence.ended:
        worker.leave(worker.fence)
    worker.fence = None
    cluster.mesh.lost(worker, noticed=0.3)
    own, copies = worker.snapshots.stock.held()
    said = (worker.name, worker.epoch, worker.step, _groups(worker), m.Holdings(own, copies))
    worker.inside = False
    worker.ask(m.WorkerReleased(*said))
    yield from worker.await_open(worker.epoch)


def _enter(worker: "Worker") -> Generator[float | None, None, m.Repair]:
    """Announce a worker that has no state yet, and wait for the order to repair."""
    if worker.empty:
        worker.ask(m.WorkerArrived(worker.name, worker.epoch, _groups(worker)))
    return (yield from worker.await_order(m.Repair))


def _groups(worker: "Worker") -> list[m.GroupReport]:
    shape = worker.cluster.shape
    return [
        m.GroupReport(name, shape.groups[name], bool(used), bool(busy), int(count))
        for name, (used, busy, count) in worker.groups.items()
    ]


def _repair(worker: "Worker", order: m.Repair) -> Generator[float | None, None, Any]:
    """Rebuild the process groups, restore the state of the ordered step, and report the result."""
    cluster = worker.cluster
    began, worker.inside = cluster.time.now, True
    yield cluster.rng.uniform(*cluster.habits.rebuild_s) * worker.slow
    worker.slow = 1.0
    yield from worker.wait_for(cluster.mesh.join(worker, "rebuild", None), "rebuild")
    for name in (*order.rebuild, *order.defer):
        if name in worker.groups:
            worker.groups[name] = [False, False, 0]
    rebuild_s = cluster.time.now - began
    sources = yield from _restore(worker, order)
    cluster.checks.restored(worker, order.step)
    worker.repaired_epoch = worker.epoch
    rebuilt, deferred = set(worker.groups) & set(order.rebuild), set(worker.groups) & set(order.defer)
    worker.ask(
        m.WorkerRepaired(
            worker=worker.name,
            epoch=worker.epoch,
            rank=worker.rank,
            step=worker.step,
            topology=_topology(worker),
            shards=[f"optimizer {worker.rank}"],
            rebuilt=len(rebuilt),
            kept=len(worker.groups) - len(rebuilt) - len(deferred),
            deferred=len(deferred),
            sources=sources,
            rebuild_s=round(rebuild_s, 3),
            restore_s=round(cluster.time.now - began - rebuild_s, 3),
        )
    )


def _restore(worker: "Worker", order: m.Repair) -> Generator[float | None, None, dict[str, str]]:
    """Restore the worker's state, like ``RecoveryManager.restore``.

    A lost pipeline stage gets its state from an adjacent stage (CheckFree, section 4), which has restored its own state
    by then.

    Returns:
        Part of the state ("owned", "replicated") -> where it came from.
    """
    beside = order.rebuilt.get(str(worker.rank))
    if beside is None:
        sources = yield from worker.snapshots.restore(order.step, order.sources[str(worker.rank)])
    parameters = worker.cluster.mesh.join(worker, "parameters", (worker.owned, worker.replicated))
    yield from worker.wait_for(parameters, "parameters")
    if beside is not None:
        worker.snapshots.rebuild(order.step, parameters.members[beside.there[0]][1])
        sources = dict.fromkeys(("owned", "replicated"), f"rebuilt:{'+'.join(map(str, beside.there))}")
    return sources


def _topology(worker: "Worker") -> str:
    """Return a text that is equal for all workers that have the same map from logical ranks to workers."""
    return f"{worker.epoch}:" + ",".join(seat.worker for _, seat in sorted(worker.seats.items()))
