"""Known bugs in the code of the control plane and of the workers, which the simulation has to find.

Each function here takes the right function of the production code and returns a wrong one (``campaign.Mutant``).
"""

from dataclasses import replace
from unittest import mock

from ft.faults import verdict
from ft.faults.verdict import REPLACE
from ft.job import messages as m
from ft.job.control import arrivals, deadlines, devices, epochs, failures, liveness, repairs
from ft.job.control import run_ends as ends
from ft.job.control.state import CLOSED, REPAIRING
from ft.job.messages import Open, Resume, WorkerDone
from ft.systems.hot_swap.recovery import Recovery
from ft.worker import protocol
from ft.worker.progress import Progress
from ft.worker.protocol import Place
from tests.simulation.campaign import Mutant

# --- the worker -------------------------------------------------------------------------------------------------------


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


WORKER_PLANTS = (
    Mutant("never repeats a report without an answer", protocol, "repeat", _nothing_is_repeated),
    Mutant("takes a seat of an epoch that is over", Place, "is_seated_by", _any_open_seats),
    Mutant("leaves its epoch when an older one is closed", Place, "note_close", _any_close_is_own),
    Mutant("obeys orders of an earlier epoch", Place, "is_for", _orders_have_no_epoch),
    Mutant("goes on without the order to resume", protocol, "await_order", _no_order_to_resume),
    Mutant("ends without the order to finish", protocol, "finish", _nobody_waits_for_finish),
    Mutant("does not report a broken connection", protocol, "suspect", _suspicions_are_kept),
    Mutant("does not report its errors", protocol, "report_failure", _errors_are_kept),
    Mutant("enters an epoch with the groups of the last one", Recovery, "_leave", _old_groups_stay),
    Mutant("joins without reporting its arrival", Recovery, "_await_repair", _arrivals_are_silent),
    Mutant("restores the step before the ordered one", Recovery, "_restore", _one_step_before),
    Mutant("keeps a state that an aborted update has changed", Recovery, "before_update", _changed_state_is_kept),
    Mutant("updates before its snapshot is complete", Recovery, "before_update", _snapshots_are_not_awaited),
    Mutant("commits a step without the fence", Recovery, "committed", _no_fence),
    Mutant("reports a repair without a restore", Recovery, "_restore", _nothing_is_restored),
    Mutant("keeps the state of another step", Recovery, "_restore", _any_untouched_state_is_kept),
    Mutant("resumes without a snapshot", Recovery, "_resume", _restored_state_has_no_snapshot),
    Mutant("waits for the fence of an interrupted step", Recovery, "_resume", _old_fence_stays),
    Mutant("keeps the seats of its first epoch", Place, "enter", _first_seats_stay),
    Mutant("takes no notice of what its device waits for", Progress, "_blocked", _only_the_host_waits),
)


# --- the control plane ------------------------------------------------------------------------------------------------


def _no_release_barrier(right):
    def order_repair(state, now, out):
        for worker in state.seated():
            if worker.release is not None:
                worker.leaving_epoch = -1
        right(state, now, out)

    return order_repair


def _one_step_too_old(right):
    def choose(ranks, holdings, dp_peers, spoiled=(), complete=()):
        newest = right(ranks, holdings, dp_peers, spoiled, complete)
        older = right(ranks, holdings, dp_peers, [*spoiled, newest[0]], complete)
        return older if older[0] is not None else newest

    return choose


def _own_snapshots_alone(right):
    def choose(ranks, holdings, dp_peers, spoiled=(), complete=()):
        own = {rank: replace(held, copies={}) for rank, held in holdings.items()}
        return right(ranks, own, dp_peers, spoiled, complete)

    return choose


def _second_failure_closes_nothing(right):
    def close(state, now, reason, ranks, out):
        if state.recovery is None:
            right(state, now, reason, ranks, out)
        else:
            state.enter(CLOSED, now)

    return close


def _any_epoch_repaired(right):
    def worker_repaired(state, now, report, out):
        worker = state.workers.get(report.worker)
        if worker is not None and worker.rank is not None and state.phase == REPAIRING and worker.repaired is None:
            worker.repaired = report
            out.add(f"{report.worker} is repaired")
        else:
            right(state, now, report, out)

    return worker_repaired


def _repaired_twice_counts_for_all(right):
    def order_resume(state, now, out):
        seated = state.seated()
        said = [w for w in seated if w.repaired is not None]
        if said and len(said) == len(seated) - 1:
            for worker in seated:
                worker.repaired = worker.repaired or said[0].repaired
        right(state, now, out)

    return order_resume


def _old_holdings(right):
    def worker_released(state, now, report, out):
        worker = state.workers.get(report.worker)
        before = worker.release if worker is not None else None
        right(state, now, report, out)
        if worker is not None and before is not None:
            worker.release = before

    return worker_released


def _no_resume_stamp(right):
    def control_back(state, now, report, out):
        out.add("the control plane is back")

    return control_back


def _dead_standbys_stay(right):
    def standby_exit(state, now, worker, code, out):
        out.add(f"standby {worker.name} has ended")

    return standby_exit


def _busy_groups_are_kept(right):
    def plan_rebuild(groups, replaced):
        blind = {rank: [_as_if_unused(report) for report in said] for rank, said in groups.items()}
        return right(blind, replaced)

    return plan_rebuild


def _as_if_unused(report: m.GroupReport) -> m.GroupReport:
    return replace(report, in_flight=False, collectives=0)


def _done_is_done(right):
    def finish_if_done(state, now, out):
        if any(worker.done for worker in state.seated()):
            for worker in state.seated():
                worker.done = True
        right(state, now, out)

    return finish_if_done


def _nobody_hangs(right):
    return lambda views, timeouts: []


def _joiners_are_full(right):
    def order_repair(state, now, out):
        for worker in state.seated():
            worker.assembled = True
        right(state, now, out)

    return order_repair


def _connections_die_with_workers(right):
    return lambda group, message: replace(right(group, message), action=REPLACE)


def _seats_need_no_taking(right):
    return lambda state, worker: state.epoch


def _devices_are_free_at_once(right):
    return lambda state, worker, now: None


def _any_device_number(right):
    return lambda agent, vacancy, taken: right(replace(agent, joined=replace(agent.joined, devices=0)), vacancy, taken)


PLANTS = (
    Mutant("skips the release barrier", epochs, "_order_repair", _no_release_barrier),
    Mutant("restores a step one too old", repairs, "choose", _one_step_too_old),
    Mutant("restores from no peer copy", repairs, "choose", _own_snapshots_alone),
    Mutant("forgets to close the epoch on a second failure", epochs, "close", _second_failure_closes_nothing),
    Mutant("accepts a stale WorkerRepaired", arrivals, "worker_repaired", _any_epoch_repaired),
    Mutant("resumes with one worker not repaired", epochs, "_order_resume", _repaired_twice_counts_for_all),
    Mutant("restores by an earlier recovery's holdings", arrivals, "worker_released", _old_holdings),
    Mutant("replays the journal without the resume stamp", arrivals, "control_back", _no_resume_stamp),
    Mutant("gives seats to dead standbys", failures, "_standby_exit", _dead_standbys_stay),
    Mutant("keeps groups that are not in step", epochs, "plan_rebuild", _busy_groups_are_kept),
    Mutant("finishes when the first worker is done", ends, "finish_if_done", _done_is_done),
    Mutant("never judges a worker to hang", liveness, "stalled", _nobody_hangs),
    Mutant("does not wait for joiners", epochs, "_order_repair", _joiners_are_full),
    Mutant("replaces a worker for a lost connection", verdict, "of_suspicion", _connections_die_with_workers),
    Mutant("does not miss who never takes its seat", deadlines, "_epoch_of", _seats_need_no_taking),
    Mutant("gives away the device of a process that still ends", devices, "hold", _devices_are_free_at_once),
    Mutant("does not count the devices of a node", devices, "choose", _any_device_number),
    *WORKER_PLANTS,
)
