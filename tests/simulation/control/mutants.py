"""Mutation test: bugs that are injected into production code.

Each bug replaces one function of the control plane's decision code (``ft.job.control``, ``ft.faults``) or of the
worker's protocol (``worker_mutants``), within the simulation's process only. The simulation must find each of them,
which shows that its checks are strong enough.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

from ft.faults import verdict
from ft.faults.verdict import REPLACE
from ft.job import messages as m
from ft.job.control import absence, arrivals, controller, deadlines, devices, epochs, failures, liveness, sources
from ft.job.control import run_ends as ends
from ft.job.control.state import CLOSED, REPAIRING
from tests.simulation import mutation
from tests.simulation.control import worker_mutants
from tests.simulation.mutation import Replaced, find_in


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
    return lambda agent, vacancy, taken: right(replace(agent, devices=0), vacancy, taken)


PLANTS = (
    Replaced("skips the release barrier", epochs, "_order_repair", _no_release_barrier),
    Replaced("restores a step one too old", sources, "choose", _one_step_too_old),
    Replaced("restores from no peer copy", sources, "choose", _own_snapshots_alone),
    Replaced("forgets to close the epoch on a second failure", epochs, "close", _second_failure_closes_nothing),
    Replaced("accepts a stale WorkerRepaired", arrivals, "worker_repaired", _any_epoch_repaired),
    Replaced("resumes with one worker not repaired", epochs, "_order_resume", _repaired_twice_counts_for_all),
    Replaced("restores by an earlier recovery's holdings", arrivals, "worker_released", _old_holdings),
    Replaced("replays the journal without the resume stamp", absence, "control_back", _no_resume_stamp),
    Replaced("gives seats to dead standbys", failures, "_standby_exit", _dead_standbys_stay),
    Replaced("keeps groups that are not in step", epochs, "plan_rebuild", _busy_groups_are_kept),
    Replaced("finishes when the first worker is done", ends, "finish_if_done", _done_is_done),
    Replaced("never judges a worker to hang", liveness, "stalled", _nobody_hangs),
    Replaced("does not wait for joiners", epochs, "_order_repair", _joiners_are_full),
    Replaced("replaces a worker for a lost connection", verdict, "of_suspicion", _connections_die_with_workers),
    Replaced("does not miss who never takes its seat", deadlines, "_epoch_of", _seats_need_no_taking),
    Replaced("gives away the device of a process that still ends", devices, "hold", _devices_are_free_at_once),
    Replaced("does not count the devices of a node", devices, "choose", _any_device_number),
    *worker_mutants.PLANTS,
)


def find(name: str) -> list[Replaced]:
    """Return the planted bugs with the title ``name``, or all of them for "all". See :func:`find_in`."""
    return find_in(PLANTS, name)


@contextmanager
def planted(plant: Replaced | None) -> Iterator[None]:
    """Inject the bug for the duration of the context, also into the controller's table of handlers."""
    if plant is None:
        yield
        return
    right = getattr(plant.owner, plant.name)
    with mutation.planted(plant):
        wrong = getattr(plant.owner, plant.name)
        handlers = {kind: wrong for kind, handler in controller._HANDLERS.items() if handler is right}
        with mock.patch.dict(controller._HANDLERS, handlers):
            yield
