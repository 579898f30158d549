"""The clock of a step's parts: nested parts, threads, blocks; and the stalls of a GPU, on a model of one."""

import gc
import threading
from types import SimpleNamespace

import cuda_model
import pytest

from ft.base import step_clock
from ft.base.step_clock import BLOCK, COMPUTE, DATA, GARBAGE, STORAGE, WARM_UP, StepClock
from ft.state.groups import device, work
from ft.state.groups.group import Group
from ft.state.groups.state import EpochState
from ft.state.groups.work import GroupWork


class Steps:
    """A clock whose time the test advances."""

    def __init__(self):
        self.now = 0.0
        self.clock = StepClock(lambda: self.now)
        self.clock.start()
        self.clock.begins(3)
        self.count = 0

    def step(self, *parts: tuple[str, float]) -> None:
        for part, seconds in parts:
            before = self.clock.switch(part)
            self.now += seconds
            self.clock.switch(before)
        self.count += 1
        self.clock.ends_step(self.count)

    def block(self, *parts: tuple[str, float]):
        for _ in range(BLOCK + (WARM_UP if not self.count else 0)):
            self.step(*parts)
        return self.clock.blocks.pop()


@pytest.fixture
def steps():
    made = Steps()
    yield made
    made.clock.stop()


def test_each_moment_belongs_to_one_part(steps):
    block = steps.block((COMPUTE, 0.5), (DATA, 0.1), ("tp", 0.2), (STORAGE, 0.05), ("dp", 0.15))
    assert block.epoch == 3 and block.steps == list(range(WARM_UP + 1, WARM_UP + BLOCK + 1))
    assert block.step_s == pytest.approx([1.0] * BLOCK) and block.own_s == pytest.approx([0.65] * BLOCK)
    assert block.parts == pytest.approx({COMPUTE: 5.0, DATA: 1.0, STORAGE: 0.5})
    assert block.waits == pytest.approx({"tp": 2.0, "dp": 1.5})


def test_what_happens_inside_a_wait_is_no_wait(steps):
    for _ in range(WARM_UP + BLOCK):
        steps.clock.begins_to_wait("tp")
        steps.now += 1.0
        steps.clock.during(DATA, lambda: setattr(steps, "now", steps.now + 0.5))
        steps.now += 1.0
        steps.clock.has_waited()
        steps.clock.has_waited()  # a second note of the same end changes nothing
        steps.now += 3.0
        steps.step()
    block = steps.clock.blocks.pop()
    assert block.waits == pytest.approx({"tp": 2.0 * BLOCK}) and block.own_s == pytest.approx([3.5] * BLOCK)


def test_garbage_collections_are_measured(steps, monkeypatch):
    ticks = iter(range(10**9))
    monkeypatch.setattr(steps.clock, "_clock", lambda: next(ticks) * 0.01)
    steps.clock.begins(3)
    gc.freeze()  # what the tests before have left need not be searched in every step
    for number in range(WARM_UP + BLOCK):
        gc.collect()
        steps.clock.ends_step(number)
    gc.unfreeze()
    assert steps.clock.blocks.pop().parts[GARBAGE] > 0.0


def test_other_threads_and_the_time_of_a_recovery_count_for_nothing(steps):
    other = threading.Thread(target=lambda: steps.clock.switch(DATA))
    other.start()
    other.join()
    block = steps.block((COMPUTE, 1.0))
    assert set(block.parts) == {COMPUTE}
    steps.step((COMPUTE, 1.0))
    steps.clock.pauses()
    steps.now += 100.0
    steps.clock.ends_step(99)
    steps.clock.begins(4)
    steps.count = 0
    block = steps.block((COMPUTE, 1.0))
    assert block.epoch == 4 and block.step_s == pytest.approx([1.0] * BLOCK)


def test_very_short_steps_are_reported_in_larger_blocks(steps):
    for _ in range(WARM_UP + 100):
        steps.step((COMPUTE, 0.002))
    assert [len(block.steps) for block in steps.clock.blocks] in ([50, 50], [51])


# --- on a device ------------------------------------------------------------------------------------------------------


class ModelNccl:
    """A communicator on the model's GPU whose operations end ``late_ms`` after this rank has begun them."""

    def __init__(self, cuda: cuda_model.Cuda):
        self.cuda, self.stream, self.late_ms = cuda, cuda_model.Stream(), 0.0

    def allreduce(self, tensors, opts=None):
        if opts == "sync":
            return self.cuda.computes(self.late_ms)
        return cuda_model.NcclWork(self.cuda, self.stream, lambda: self.cuda.computes(self.late_ms))


class Rank:
    """A worker with one group over NCCL, which trains on a model of a GPU."""

    def __init__(self, cuda, monkeypatch):
        self.cuda, self.now = cuda, 0.0
        self.clock = StepClock(lambda: self.now)
        self.stalls = device.Stalls()
        monkeypatch.setattr(device, "time", SimpleNamespace(perf_counter=lambda: 0.0))  # recording costs nothing
        for module in (device, step_clock):
            monkeypatch.setattr(module, "CLOCK", self.clock)
        monkeypatch.setattr("ft.state.groups.group.STALLS", self.stalls)
        monkeypatch.setattr(work, "STALLS", self.stalls)
        monkeypatch.setattr("ft.state.groups.group.DEVICE.mark", lambda *args: cuda_model.Event())
        self.group = Group("tp", "", [0, 1], 0, EpochState(0, False, lambda name, error: None), None)
        self.group.connectors = {"cuda": None, "cpu": None}
        self.group._connections, self.group._inner = {"cuda": None}, ModelNccl(cuda)
        monkeypatch.setattr("ft.state.groups.group._device_type", lambda values: "cuda" if values else None)
        monkeypatch.setattr(GroupWork, "is_unfinished", lambda work: False)
        self.clock.start()
        self.clock.begins(0)

    def step(self, number: int, late_ms: float, computes_ms: float = 10.0) -> None:
        """Compute twice, with an operation after each: one is waited for, one is put onto the stream."""
        self.group._inner.late_ms = late_ms
        self.cuda.computes(computes_ms)
        self.group.allreduce([]).wait()
        self.cuda.computes(computes_ms)
        self.group.allreduce([], "sync")
        self.now += (2 * computes_ms + 2 * late_ms) / 1e3
        self.clock.ends_step(number)


@pytest.mark.parametrize("seed", range(20))
def test_a_device_that_waits_is_told_from_one_that_computes(seed, monkeypatch):
    with cuda_model.Cuda(seed) as cuda:
        rank = Rank(cuda, monkeypatch)
        try:
            for number in range(WARM_UP + 2 * BLOCK):
                rank.step(number, late_ms=0.0 if number < WARM_UP + BLOCK else 4.0)
            assert not cuda.sites & {"Event.synchronize", "Stream.synchronize"}, "nothing may wait for the device"
            cuda.synchronize()
            rank.step(WARM_UP + 2 * BLOCK, late_ms=4.0)
            early, late = list(rank.clock.blocks)[:2]
        finally:
            rank.clock.stop()
    assert early.own_s == pytest.approx([0.020] * BLOCK) and early.waits == {"tp": 0.0}
    assert late.own_s == pytest.approx([0.020] * BLOCK), "waiting is no work of its own"
    assert late.waits == pytest.approx({"tp": 0.008 * BLOCK}) and late.step_s == pytest.approx([0.028] * BLOCK)


def test_fewer_steps_are_measured_where_measuring_is_dear(monkeypatch):
    with cuda_model.Cuda(1) as cuda:
        rank = Rank(cuda, monkeypatch)
        try:
            rank.stalls._cost_s = 3.5 * device._SHARE * 0.020
            rank.step(1, late_ms=0.0)
            measured = []
            for number in range(2, 8):
                measured.append(rank.stalls.begins(trains=True) is not None)
                rank.step(number, late_ms=0.0)
        finally:
            rank.clock.stop()
    assert measured == [False, False, False, True, True, True]
