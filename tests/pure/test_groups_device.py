"""Groups on a GPU: aborts, failed works and the age of the oldest unfinished operation, on a model of NCCL."""

import os
import threading
import time
from datetime import timedelta

import fake_nccl
import pytest
import torch
import torch.distributed as dist
from fake_nccl import Gpu, Nccl
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from waiting import eventually

from ft.base.errors import EpochClosed, UserError
from ft.faults.verdict import REPLACE, of_error
from ft.job.control.timeouts import Timeouts
from ft.platform import releases
from ft.state.groups import backends, group, registry, work
from ft.state.groups.backends import AbortError, NcclConnection, NcclConnector, interrupt_together, prepare_nccl
from ft.state.groups.builder import Builder
from ft.state.groups.device import Device
from ft.state.groups.group import Group
from ft.state.groups.registry import Groups
from ft.state.groups.state import EpochState


def fake_device(monkeypatch) -> Device:
    """Replace NCCL and CUDA by fakes, in torch and in the groups; return the groups' new device."""
    fake_nccl.take_over_torch(monkeypatch)
    own = Device()
    for module in (backends, group, registry, work):
        monkeypatch.setattr(module, "DEVICE", own)
    monkeypatch.setattr(group, "wrap", lambda connections, rank, size: connections[0].backend)
    return own


class Rank:
    """Three NCCL groups of one worker, the last one idle."""

    def __init__(self, monkeypatch):
        self.device = fake_device(monkeypatch)
        self.gpu = Gpu()
        self.groups = Groups(None, "nccl", EpochState(0, False, lambda name, error: None), None, None, Timeouts())
        self.nccl = [Nccl(self.gpu) for _ in range(3)]
        self.members = [self._group(name, nccl) for name, nccl in zip(("tp", "dp", "pp"), self.nccl, strict=True)]

    def _group(self, name: str, nccl: Nccl) -> Group:
        made = Group(name, "", [0, 1], 0, self.groups._state, self.groups)
        made.connectors = {"cuda": None, "cpu": None}
        made.attach(NcclConnection(nccl, name, fake_nccl.LIMIT_S))
        self.groups._groups[name] = made
        return made


@pytest.fixture
def rank(monkeypatch):
    made = Rank(monkeypatch)
    yield made
    fake_nccl.Event.passed.set()
    made.device.stop(1.0)


def interrupted(rank: Rank) -> list[str]:
    return [report.name for report in rank.groups.reports() if report.in_flight]


def test_two_hung_groups_are_aborted_together(rank):
    for member, nccl in zip(rank.members[:2], rank.nccl, strict=False):
        nccl.hang()
        member.allreduce([]).wait()  # returns at once
    began = time.monotonic()
    rank.groups.close(0, "a rank died")
    assert interrupted(rank) == ["tp", "dp"]
    rank.groups.drop()
    assert time.monotonic() - began < fake_nccl.LIMIT_S
    assert [nccl.aborts for nccl in rank.nccl] == [1, 1, 0]


def test_an_abort_that_fails_skips_no_other_and_ends_the_worker(rank):
    for member, nccl in zip(rank.members[:2], rank.nccl, strict=False):
        nccl.hang()
        member.allreduce([])
    rank.nccl[0].broken = "unhandled cuda error"
    rank.gpu.hung.discard(rank.nccl[0])
    rank.groups.close(0, "a rank died")
    with pytest.raises(AbortError, match="tp failed: unhandled cuda error") as raised:
        rank.groups.drop()
    assert rank.nccl[1].aborts == 1 and not rank.nccl[1].running
    assert of_error([type(raised.value).__name__], str(raised.value)).action == REPLACE


def test_an_abort_that_does_not_end_ends_the_worker_and_nobody_asks_the_device(rank):
    rank.members[0].attach(NcclConnection(rank.nccl[0], "tp", 0.2))
    rank.nccl[0].hang()
    rank.nccl[2].hang()  # hung, and not to be aborted by anybody
    stuck = rank.members[0].allreduce([])
    with pytest.raises(AbortError, match="tp did not end"):
        interrupt_together(rank.members[0].connections())
    assert not stuck.is_completed()
    rank.nccl[2].abort()
    eventually(stuck.is_completed)


def test_a_failed_work_is_no_finished_one(rank):
    failed = rank.members[1].allreduce([])
    rank.nccl[1].works[0].fail(RuntimeError("NCCL error: remote process exited"))
    assert not failed.is_success()
    assert rank.groups.oldest_unfinished()[:2] == ("dp", "allreduce")
    rank.groups.close(0, "a rank died")
    assert interrupted(rank) == ["dp"]


def test_a_work_that_was_waited_for_may_still_run(rank):
    works = [member.allreduce([]) for member in rank.members]
    assert all(work.wait() for work in works)
    rank.nccl[0].works[0].finish()
    assert [work.is_success() for work in works] == [True, False, False]
    rank.groups.close(0, "a rank died")
    assert interrupted(rank) == ["dp", "pp"]
    with pytest.raises(EpochClosed):
        works[0].wait()
    rank.groups.drop()
    with pytest.raises(EpochClosed):
        works[1].wait()


def test_the_oldest_unfinished_work_is_known_from_the_watchdog(rank):
    assert rank.groups.oldest_unfinished() is None
    rank.members[1].allreduce([]).wait()
    time.sleep(0.05)
    rank.members[0].allreduce([]).wait()
    name, operation, age = rank.groups.oldest_unfinished()
    assert (name, operation) == ("dp", "allreduce") and age >= 0.05
    rank.nccl[1].works[0].finish()
    assert rank.groups.oldest_unfinished()[0] == "tp"
    rank.nccl[0].works[0].finish()
    assert rank.groups.oldest_unfinished() is None
    assert not any(member._flight for member in rank.members)


def test_no_thread_asks_a_work_for_its_end_when_an_epoch_is_closed(rank, monkeypatch):
    """``WorkNCCL::isCompleted`` waits for the communicator's mutex and keeps the interpreter lock meanwhile."""
    for member in rank.members:
        member.allreduce([]).wait()
    rank.nccl[2].works[0].finish()
    monkeypatch.setattr(fake_nccl.Work, "is_completed", lambda work: pytest.fail("asked"))
    assert rank.groups.oldest_unfinished()[0] == "tp" and rank.groups.inspect().counts
    rank.groups.close(0, "a rank died")
    assert interrupted(rank) == ["tp", "dp"]


def test_a_work_of_another_thread_counts_on_a_device(rank):
    """The backward pass runs in threads of autograd."""
    thread = threading.Thread(target=lambda: rank.members[1].allreduce([]))
    thread.start()
    thread.join()
    assert rank.groups.oldest_unfinished()[0] == "dp"


def test_the_oldest_operation_without_a_work_is_known_from_events(rank):
    for member in rank.members:
        assert member.allreduce([], "sync") is None
    assert rank.groups.oldest_unfinished()[:2] == ("tp", "allreduce")
    fake_nccl.Event.passed.set()
    eventually(lambda: rank.groups.oldest_unfinished() is None)


def test_a_program_far_ahead_of_its_device_does_not_look_at_all_works_each_time(rank, monkeypatch):
    asked = []
    monkeypatch.setattr(fake_nccl.Work, "is_completed", lambda work: bool(asked.append(work)))
    for _ in range(2000):
        rank.members[0].allreduce([])
    assert len(asked) < 3 * 2000


class Worker:
    """A worker whose NCCL group of two ranks is made by a builder, as at the start and after a recovery."""

    def __init__(self, monkeypatch):
        fake_device(monkeypatch)
        monkeypatch.setattr(dist, "ProcessGroupNCCL", fake_nccl.MakesCommunicator, raising=False)
        monkeypatch.setattr(torch, "empty", lambda *sizes, device: None)
        self.members = fake_nccl.MakesCommunicator.members = fake_nccl.Members(2)
        self.groups = Groups(None, "nccl", EpochState(0, False, lambda name, error: None), None, None, Timeouts())
        self.builder = self.groups._builder = Builder("prefix", fake_nccl.RendezvousStore())
        self.group = Group("tp", "", [0, 1], 0, self.groups._state, self.groups)
        self.group.connectors = {"cuda": NcclConnector(0, 2, timedelta(seconds=60), 10.0), "cpu": None}
        self.groups._groups["tp"] = self.group
        self.groups._submit(self.group)
        eventually(lambda: self.members.made)
        self.nccl = self.members.made[0]

    def trains(self) -> "Outcome":
        """Start the first operation, in a thread, and return what becomes of it."""
        return Outcome(lambda: self.group.allreduce([]))


class Outcome(threading.Thread):
    """A call in another thread. ``error``: the exception that it has raised."""

    def __init__(self, call):
        super().__init__(daemon=True)
        self._call, self.error = call, None
        self.start()

    def run(self) -> None:
        try:
            self._call()
        except Exception as error:
            self.error = error


@pytest.fixture
def worker(monkeypatch):
    made = Worker(monkeypatch)
    yield made
    made.members.time_is_up.set()
    made.builder.cancel()
    made.builder.thread.join()


def test_a_survivor_leaves_at_once_when_a_member_is_lost_while_a_communicator_is_made(worker):
    outcome = worker.trains()
    eventually(worker.nccl.mutex.locked)
    worker.groups.close(0, "a rank died")
    outcome.join()
    assert isinstance(outcome.error, EpochClosed)
    worker.groups.drop()
    assert worker.builder.thread.is_alive() and worker.nccl.mutex.locked(), "torch still waits inside"
    assert worker.groups.reports()[0].in_flight
    worker.members.time_is_up.set()
    worker.builder.thread.join()
    eventually(lambda: worker.nccl.aborted)


def test_a_communicator_may_take_longer_than_torchs_own_limit(worker):
    outcome = worker.trains()
    worker.members.time_is_up.set()
    eventually(lambda: worker.nccl.waits > 1)
    worker.members.join()
    worker.members.time_is_up.clear()
    outcome.join()
    assert outcome.error is None and worker.nccl.launched == 1 and not worker.nccl.aborted


def test_a_survivor_whose_first_operation_connects_to_a_lost_rank_leaves_at_the_limit(worker):
    worker.members.join()
    worker.nccl.connects = False  # the other rank has died between
    outcome = worker.trains()
    eventually(lambda: worker.nccl.polls > 1)
    worker.groups.close(0, "a rank died")
    eventually(lambda: worker.nccl.aborted)
    assert outcome.is_alive(), "torch does not notice the abort"
    worker.members.time_is_up.set()
    outcome.join()
    assert isinstance(outcome.error, EpochClosed)
    worker.groups.drop()


def test_closing_an_epoch_does_not_wait_for_a_launch_that_holds_the_mutex(worker):
    """Torch 2.8 holds it until NCCL has taken a message (``getNcclComm`` in ``C10D_NCCL_CHECK_TIMEOUT_GROUPEND``)."""
    worker.members.join()
    first = worker.trains()
    first.join()
    worker.nccl.connects, worker.nccl.holds = False, True
    outcome = worker.trains()
    eventually(worker.nccl.mutex.locked)
    worker.groups.close(0, "a rank died")
    assert worker.groups.reports()[0].in_flight and outcome.is_alive()
    worker.members.time_is_up.set()
    outcome.join()
    worker.groups.drop()
    assert isinstance(outcome.error, EpochClosed) and worker.nccl.aborted


def test_the_programs_options_and_the_groups_name_reach_every_backend_of_a_group(worker):
    given = fake_nccl.MakesCommunicator.Options()
    given.is_high_priority_stream, given.config.max_ctas = True, 8
    worker.members.join()
    worker.groups._default_rank, worker.groups._state.alone = 0, True
    made = worker.groups.new_group([0, 1], timedelta(seconds=5), "tp7", "TP", "nccl", given)
    for _ in range(2):  # at the start and after a recovery
        fake_nccl.MakesCommunicator.members = fake_nccl.Members(1)
        backend = made.connectors["cuda"].connect(store := dist.HashStore(), None, lambda: False).backend
        assert backend.options.is_high_priority_stream and backend.options.config.max_ctas == 8
        assert (backend.options.group_name, backend.options.global_ranks_in_group) == ("tp7", [0, 1])
        assert (backend.options._timeout, backend.options.config.blocking) == (timedelta(seconds=5), 0)
        assert store.timeout == timedelta(seconds=5), "the first member may be late"


def test_settings_of_the_site_that_would_end_survivors_are_replaced_and_reported(monkeypatch):
    monkeypatch.setattr("os.environ", {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", "TORCH_NCCL_NAN_CHECK": "1"})
    said: list[str] = []
    prepare_nccl(15.0, said.append)
    assert len(said) == 1 and "TORCH_NCCL_ASYNC_ERROR_HANDLING=1 is replaced by 0" in said[0]
    assert os.environ["TORCH_NCCL_RETHROW_CUDA_ERRORS"] == os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
    assert (os.environ["TORCH_NCCL_NAN_CHECK"], os.environ["NCCL_NVLS_ENABLE"]) == ("1", "0")


@pytest.mark.parametrize(
    ("found", "environment", "says"),
    [
        ({"NCCL": (2, 21, 5)}, {}, ["wait for each other"]),
        ({"NCCL": (2, 27, 7)}, {}, []),
        ({"NCCL": (2, 27, 7)}, {"NCCL_RAS_ENABLE": "1"}, ["RAS"]),
    ],
)
def test_known_faults_of_releases_are_told_at_the_start(monkeypatch, found, environment, says):
    monkeypatch.setattr("os.environ", dict(environment))
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: found["NCCL"], raising=False)
    monkeypatch.setattr(releases, "installed", lambda: found)
    said: list[str] = []
    prepare_nccl(15.0, said.append)
    assert len(said) == len(says) and all(word in one for word, one in zip(says, said, strict=True))
    assert all("(https://" in one for one in said)


@pytest.mark.parametrize(("given", "says"), [({}, 0), ({"TORCH_NCCL_NONBLOCKING_TIMEOUT": "1800"}, 1)])
def test_torchs_own_wait_ends_before_a_worker_has_to_leave_an_epoch(monkeypatch, given, says):
    monkeypatch.setattr("os.environ", dict(given))
    said: list[str] = []
    prepare_nccl(Timeouts().launch_s, said.append)
    assert int(os.environ["TORCH_NCCL_NONBLOCKING_TIMEOUT"]) < Timeouts().drain_s and len(said) == says
    for name in ("launch_s", "abort_s"):
        with pytest.raises(UserError, match=f"drain_s = 20 s is not longer than {name} = 25 s"):
            Timeouts(**{name: 25.0}).check()


def test_gloo_refuses_messages_from_a_gpu_and_takes_its_collectives(rank):
    member = rank.members[0]
    member.connectors = {"cpu": None}
    # Where another test has applied the patches, a tensor that is made for "cuda" is on the CPU.
    tensor = FakeTensor(FakeTensorMode(), torch.empty(3, device="meta"), torch.device("cuda", 0))
    for message in (lambda: member.send([tensor], 1), lambda: member.recv([tensor], 1)):
        with pytest.raises(UserError, match="gloo sends no messages from GPU memory"):
            message()
