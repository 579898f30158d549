"""Known bugs in the code of the control plane and of the workers, which the simulation has to find.

Each function here does the wrong thing in the place of the right function, its first argument.
"""

from dataclasses import replace
from unittest import mock

from ft.faults import verdict
from ft.faults.verdict import REPLACE
from ft.job.control import arrivals, deadlines, devices, epochs, failures, liveness, repairs
from ft.job.control import run_ends as ends
from ft.job.control.state import CLOSED, REPAIRING
from ft.job.messages import Open, Resume, WorkerDone
from ft.job.parts import GroupReport
from ft.systems.hot_swap.recovery import WorkerRecovery
from ft.worker import protocol
from ft.worker.progress import Progress
from ft.worker.protocol import Member
from tests.simulation.campaign import Mutant, planter

PLANTS: list[Mutant] = []
plant = planter(PLANTS)

# --- the worker -------------------------------------------------------------------------------------------------------


@plant("never repeats a report without an answer", protocol, "repeat")
def _nothing_is_repeated(right, member, report):
    return None


@plant("takes a seat of an epoch that is over", Member, "is_seated_by")
def _any_open_seats(right, self, order):
    return isinstance(order, Open) and any(seat.worker == self.worker for seat in order.seats.values())


@plant("leaves its epoch when an older one is closed", Member, "note_close")
def _any_close_is_own(right, self, order):
    self.closed_epoch = max(self.closed_epoch, self.epoch)
    return True


@plant("obeys orders of an earlier epoch", Member, "is_for")
def _orders_have_no_epoch(right, self, order, kind):
    return isinstance(order, kind)


@plant("goes on without the order to resume", protocol, "await_order")
async def _no_order_to_resume(right, member, kind, report=None):
    if kind is not Resume:
        return await right(member, kind, report)
    member.send(report)
    return None


@plant("ends without the order to finish", protocol, "finish")
async def _nobody_waits_for_finish(right, member, step):
    member.send(WorkerDone(member.worker, member.epoch, step))


@plant("does not report a broken connection", protocol, "suspect")
async def _suspicions_are_kept(right, member, what, error, verdict_s):
    await member.wait_closed(verdict_s)


@plant("does not report its errors", protocol, "report_failure")
async def _errors_are_kept(right, member, step, error):
    member.progress.idles("failed")


@plant("enters an epoch with the groups of the last one", WorkerRecovery, "_leave")
async def _old_groups_stay(right, self):
    with mock.patch.object(self._operations, "drop_groups", lambda: None):
        await right(self)


@plant("joins without reporting its arrival", WorkerRecovery, "_await_repair")
async def _arrivals_are_silent(right, self):
    with mock.patch.object(self, "is_empty", False):
        return await right(self)


@plant("restores the step before the ordered one", WorkerRecovery, "_restore")
async def _one_step_before(right, self, order):
    return await right(self, replace(order, step=order.step - 1))


@plant("keeps a state that an aborted update has changed", WorkerRecovery, "before_update")
async def _changed_state_is_kept(right, self):
    await right(self)
    self._untouched = True


@plant("updates before its snapshot is complete", WorkerRecovery, "before_update")
async def _snapshots_are_not_awaited(right, self):
    async def nothing():
        pass

    with mock.patch.object(self._operations, "wait_for_snapshot", nothing):
        await right(self)


@plant("commits a step without the fence", WorkerRecovery, "committed")
async def _no_fence(right, self):
    self._fence = None
    await right(self)


@plant("reports a repair without a restore", WorkerRecovery, "_restore")
async def _nothing_is_restored(right, self, order):
    self.is_empty = False
    return {"owned": "own", "replicated": "own"}


@plant("keeps the state of another step", WorkerRecovery, "_restore")
async def _any_untouched_state_is_kept(right, self, order):
    restored = self._operations.restore_snapshot

    async def kept(step, source, keep):
        return await restored(step, source, self._untouched)

    with mock.patch.object(self._operations, "restore_snapshot", kept):
        return await right(self, order)


@plant("resumes without a snapshot", WorkerRecovery, "_resume")
def _restored_state_has_no_snapshot(right, self):
    with mock.patch.object(self, "_take_snapshot", lambda step: None):
        right(self)


@plant("waits for the fence of an interrupted step", WorkerRecovery, "_resume")
def _old_fence_stays(right, self):
    fence = self._fence
    right(self)
    self._fence = fence


@plant("keeps the seats of its first epoch", Member, "enter")
def _first_seats_stay(right, self, opened):
    seats = self.seats
    right(self, opened)
    self.seats = seats or self.seats


@plant("takes no notice of what its device waits for", Progress, "_blocked")
def _only_the_host_waits(right, self, now):
    return self.waiting()


# --- the control plane ------------------------------------------------------------------------------------------------


@plant("skips the release barrier", epochs, "_order_repair")
def _no_release_barrier(right, state, now, out):
    for worker in state.seated():
        if worker.release is not None:
            worker.leaving_epoch = -1
    right(state, now, out)


@plant("restores a step one too old", repairs, "choose")
def _one_step_too_old(right, ranks, holdings, dp_peers, spoiled=(), complete=()):
    newest = right(ranks, holdings, dp_peers, spoiled, complete)
    older = right(ranks, holdings, dp_peers, [*spoiled, newest[0]], complete)
    return older if older[0] is not None else newest


@plant("restores from no peer copy", repairs, "choose")
def _own_snapshots_alone(right, ranks, holdings, dp_peers, spoiled=(), complete=()):
    own = {rank: replace(held, copies={}) for rank, held in holdings.items()}
    return right(ranks, own, dp_peers, spoiled, complete)


@plant("forgets to close the epoch on a second failure", epochs, "close")
def _second_failure_closes_nothing(right, state, now, reason, ranks, out):
    if state.recovery is None:
        right(state, now, reason, ranks, out)
    else:
        state.enter(CLOSED, now)


@plant("accepts a stale WorkerRepaired", arrivals, "worker_repaired")
def _any_epoch_repaired(right, state, now, report, out):
    worker = state.workers.get(report.worker)
    if worker is not None and worker.rank is not None and state.phase == REPAIRING and worker.repaired is None:
        worker.repaired = report
        out.add(f"{report.worker} is repaired")
    else:
        right(state, now, report, out)


@plant("resumes with one worker not repaired", epochs, "_order_resume")
def _repaired_twice_counts_for_all(right, state, now, out):
    seated = state.seated()
    said = [w for w in seated if w.repaired is not None]
    if said and len(said) == len(seated) - 1:
        for worker in seated:
            worker.repaired = worker.repaired or said[0].repaired
    right(state, now, out)


@plant("restores by an earlier recovery's holdings", arrivals, "worker_released")
def _old_holdings(right, state, now, report, out):
    worker = state.workers.get(report.worker)
    before = worker.release if worker is not None else None
    right(state, now, report, out)
    if worker is not None and before is not None:
        worker.release = before


@plant("replays the journal without the resume stamp", arrivals, "control_back")
def _no_resume_stamp(right, state, now, report, out):
    out.add("the control plane is back")


@plant("gives seats to dead standbys", failures, "_standby_exit")
def _dead_standbys_stay(right, state, now, worker, code, out):
    out.add(f"standby {worker.name} has ended")


@plant("keeps groups that are not in step", epochs, "plan_rebuild")
def _busy_groups_are_kept(right, groups, replaced):
    blind = {rank: [_as_if_unused(report) for report in said] for rank, said in groups.items()}
    return right(blind, replaced)


def _as_if_unused(report: GroupReport) -> GroupReport:
    return replace(report, in_flight=False, collectives=0)


@plant("finishes when the first worker is done", ends, "finish_if_done")
def _done_is_done(right, state, now, out):
    if any(worker.done for worker in state.seated()):
        for worker in state.seated():
            worker.done = True
    right(state, now, out)


@plant("never judges a worker to hang", liveness, "stalled")
def _nobody_hangs(right, views, timeouts):
    return []


@plant("does not wait for joiners", epochs, "_order_repair")
def _joiners_are_full(right, state, now, out):
    for worker in state.seated():
        worker.assembled = True
    right(state, now, out)


@plant("replaces a worker for a lost connection", verdict, "of_suspicion")
def _connections_die_with_workers(right, group, message):
    return replace(right(group, message), action=REPLACE)


@plant("does not miss who never takes its seat", deadlines, "_epoch_of")
def _seats_need_no_taking(right, state, worker):
    return state.epoch


@plant("gives away the device of a process that still ends", devices, "hold")
def _devices_are_free_at_once(right, state, worker, now):
    return None


@plant("does not count the devices of a node", devices, "choose")
def _any_device_number(right, agent, vacancy, taken):
    return right(replace(agent, joined=replace(agent.joined, devices=0)), vacancy, taken)
