"""A worker's recovery from the end of an epoch to the first step of the next (DEADPOOL, sections V-C, VI-D to VI-F).

    leave   abort every operation; report the snapshots held and the operations that were pending
    enter   take the seats of the next epoch; a worker without a state of its own reports that it has arrived
    repair  rebuild the process groups that need it, and put the state of the restore step in place
    resume  start when all workers are ready and the invariants hold

An epoch that is closed in between sends the worker back to the start of this list.
"""

import time
from typing import TYPE_CHECKING

from ft.base.errors import EpochClosed
from ft.job.messages import Repair, Resume, WorkerArrived, WorkerReleased, WorkerRepaired
from ft.worker.acknowledged import send_until_acknowledged

if TYPE_CHECKING:
    from ft.systems.hot_swap.recovery_manager import RecoveryManager
    pass


def recover(guard: "RecoveryManager") -> None:
    """Bring this worker to the first step of an open epoch."""
    session = guard.session
    while True:
        session.progress.idles("recovery")
        try:
            if session.closed:
                _leave(guard)
            repaired = _repair(guard, _enter(guard))
            with send_until_acknowledged(session.link, repaired):
                session.orders.wait(Resume, session.epoch)
            guard.at("resume")
        except EpochClosed:
            continue
        except Exception as error:
            guard.fails(error)
            continue
        guard.resumes()
        return


def _leave(guard: "RecoveryManager") -> None:
    session = guard.session
    try:
        guard.snapshots.settle()
        groups = session.groups.reports()
        session.groups.drop()
        guard.at("leave")
    except Exception as error:
        # No operation of the epoch is pending here, so none can have caused the error: this worker may be unfit.
        session.link.send(guard.failure(error))
        raise
    left = WorkerReleased(session.worker, session.epoch, guard.step, groups, guard.snapshots.holdings())
    with send_until_acknowledged(session.link, left):
        rank, opened = session.orders.wait_open(session.worker, newer_than=session.epoch)
    session.enter(rank, opened)


def _enter(guard: "RecoveryManager") -> Repair:
    session = guard.session
    if guard.is_empty:
        guard.at("assemble")
        arrived = WorkerArrived(session.worker, session.epoch, session.groups.reports())
        with send_until_acknowledged(session.link, arrived):
            return session.orders.wait(Repair, session.epoch)
    return session.orders.wait(Repair, session.epoch)


def _repair(guard: "RecoveryManager", order: Repair) -> WorkerRepaired:
    session = guard.session
    guard.at("rebuild")
    meeting = session.meeting_place()
    rebuild_s = session.groups.rebuild(order.rebuild, order.defer, session.prefix(), session.epoch, meeting)
    session.groups.reopen(session.epoch)
    guard.at("restore")
    began = time.monotonic()
    sources = guard.restore(order)
    mine = {report.name for report in session.groups.reports()}
    rebuilt, deferred = mine & set(order.rebuild), mine & set(order.defer)
    return WorkerRepaired(
        worker=session.worker,
        epoch=session.epoch,
        rank=session.rank,
        step=guard.step,
        topology=session.topology(),
        shards=guard.shards,
        rebuilt=len(rebuilt),
        kept=len(mine) - len(rebuilt) - len(deferred),
        deferred=len(deferred),
        sources=sources,
        rebuild_s=rebuild_s,
        restore_s=time.monotonic() - began,
    )
