"""Bugs in the worker's production code for the mutation test (``mutants``).

The code is ``ft.worker.protocol``, ``ft.worker.progress``, ``ft.worker.protocol`` and ``ft.systems.hot_swap.recovery``.
Each function here takes the right function and returns a wrong one.
"""

from dataclasses import replace
from unittest import mock

from ft.job.messages import Open, Resume, WorkerDone
from ft.systems.hot_swap.recovery import Recovery
from ft.worker import protocol
from ft.worker.progress import Progress
from ft.worker.protocol import Place
from tests.simulation.mutation import Replaced


def _nothing_is_repeated(right):
    return lambda member, report: None


def _any_open_seats(right):
    def is_seated_by(self, order):
        return isinstance(order, Open) and any(seat.worker == self.worker for seat in order.seats.values())

    return is_seated_by


def _any_close_is_own(right):
    def note_close(self, order):
        self.closed_epoch = max(self.closed_epoch, self.epoch)
        return True

    return note_close


def _orders_have_no_epoch(right):
    return lambda self, order, kind: isinstance(order, kind)


def _no_order_to_resume(right):
    async def await_order(member, kind, report=None):
        if kind is not Resume:
            return await right(member, kind, report)
        member.send(report)
        return None

    return await_order


def _nobody_waits_for_finish(right):
    async def finish(member, step):
        member.send(WorkerDone(member.worker, member.epoch, step))

    return finish


def _suspicions_are_kept(right):
    async def suspect(member, what, error, verdict_s):
        await member.wait_closed(verdict_s)

    return suspect


def _errors_are_kept(right):
    async def report_failure(member, step, error):
        member.progress.idles("failed")

    return report_failure


def _old_groups_stay(right):
    async def leave(self):
        with mock.patch.object(self._operations, "drop_groups", lambda: None):
            await right(self)

    return leave


def _arrivals_are_silent(right):
    async def await_repair(self):
        with mock.patch.object(self, "is_empty", False):
            return await right(self)

    return await_repair


def _one_step_before(right):
    async def restore(self, order):
        return await right(self, replace(order, step=order.step - 1))

    return restore


def _changed_state_is_kept(right):
    async def before_update(self):
        await right(self)
        self._untouched = True

    return before_update


def _snapshots_are_not_awaited(right):
    async def nothing():
        pass

    async def before_update(self):
        with mock.patch.object(self._operations, "wait_for_snapshot", nothing):
            await right(self)

    return before_update


def _no_fence(right):
    async def committed(self):
        self._fence = None
        await right(self)

    return committed


def _nothing_is_restored(right):
    async def restore(self, order):
        self.is_empty = False
        return {"owned": "own", "replicated": "own"}

    return restore


def _any_untouched_state_is_kept(right):
    async def restore(self, order):
        restored = self._operations.restore_snapshot

        async def kept(step, source, keep):
            return await restored(step, source, self._untouched)

        with mock.patch.object(self._operations, "restore_snapshot", kept):
            return await right(self, order)

    return restore


def _restored_state_has_no_snapshot(right):
    def resume(self):
        with mock.patch.object(self, "_take_snapshot", lambda step: None):
            right(self)

    return resume


def _old_fence_stays(right):
    def resume(self):
        fence = self._fence
        right(self)
        self._fence = fence

    return resume


def _first_seats_stay(right):
    def enter(self, opened):
        seats = self.seats
        right(self, opened)
        self.seats = seats or self.seats

    return enter


def _only_the_host_waits(right):
    return lambda self, now: self.waiting()


PLANTS = (
    Replaced("never repeats a report without an answer", protocol, "repeat", _nothing_is_repeated),
    Replaced("takes a seat of an epoch that is over", Place, "is_seated_by", _any_open_seats),
    Replaced("leaves its epoch when an older one is closed", Place, "note_close", _any_close_is_own),
    Replaced("obeys orders of an earlier epoch", Place, "is_for", _orders_have_no_epoch),
    Replaced("goes on without the order to resume", protocol, "await_order", _no_order_to_resume),
    Replaced("ends without the order to finish", protocol, "finish", _nobody_waits_for_finish),
    Replaced("does not report a broken connection", protocol, "suspect", _suspicions_are_kept),
    Replaced("does not report its errors", protocol, "report_failure", _errors_are_kept),
    Replaced("enters an epoch with the groups of the last one", Recovery, "_leave", _old_groups_stay),
    Replaced("joins without reporting its arrival", Recovery, "_await_repair", _arrivals_are_silent),
    Replaced("restores the step before the ordered one", Recovery, "_restore", _one_step_before),
    Replaced("keeps a state that an aborted update has changed", Recovery, "before_update", _changed_state_is_kept),
    Replaced("updates before its snapshot is complete", Recovery, "before_update", _snapshots_are_not_awaited),
    Replaced("commits a step without the fence", Recovery, "committed", _no_fence),
    Replaced("reports a repair without a restore", Recovery, "_restore", _nothing_is_restored),
    Replaced("keeps the state of another step", Recovery, "_restore", _any_untouched_state_is_kept),
    Replaced("resumes without a snapshot", Recovery, "_resume", _restored_state_has_no_snapshot),
    Replaced("waits for the fence of an interrupted step", Recovery, "_resume", _old_fence_stays),
    Replaced("keeps the seats of its first epoch", Place, "enter", _first_seats_stay),
    Replaced("takes no notice of what its device waits for", Progress, "_blocked", _only_the_host_waits),
)
