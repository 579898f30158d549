"""What a worker says in its heartbeats, and what it remembers of the operations of its steps."""

import gc
import time

import pytest

from ft.faults.hang.inspection import ADDED, SKIPPED
from ft.state.groups import history
from ft.state.groups.history import History, StartedOperation
from ft.worker.progress import Progress


class Training:
    """A worker with a clock of its own. ``host``, ``device``: what blocks the training thread, and the device."""

    def __init__(self):
        self.now, self.host, self.started = 100.0, None, None
        self.progress = Progress(lambda: self.host, lambda: self.now, self.unfinished)
        self.progress.begins(4)

    def unfinished(self):
        """NCCL's wait has returned (torch, ProcessGroupNCCL.cpp, ``synchronizeStream``); the operation goes on."""
        return None if self.started is None else ("tp", "allreduce", self.now - self.started)

    def after(self, seconds: float):
        self.now += seconds
        return self.progress.beat()


@pytest.fixture
def training():
    return Training()


def test_an_unfinished_operation_of_a_device_is_a_wait_for_as_long_as_it_is_unfinished(training):
    training.started = training.now
    beat = training.after(12.0)
    assert (beat.doing, beat.where, beat.since_s) == ("wait", "tp, allreduce", 12.0)
    training.started = None
    assert training.after(0.1).doing == "compute"


def test_of_host_and_device_the_older_wait_counts(training):
    training.host, training.started = ("fence", training.now), training.now + 1.0
    assert training.after(3.0).where == "fence"
    training.started = training.now - 8.0
    assert training.after(0.0).where == "tp, allreduce"


def test_operations_that_end_show_that_the_worker_makes_progress(training):
    for _ in range(30):
        training.started = training.now - 0.2
        training.after(0.1)
    training.started = None
    beat = training.after(1.0)
    assert (beat.doing, beat.since_s) == ("compute", 0.0) and training.after(2.0).since_s == 2.0
    assert beat.at_step_s == pytest.approx(4.0)


@pytest.mark.parametrize("what", ["evaluate", "save"])
def test_a_wait_in_an_evaluation_or_a_save_is_a_wait_and_work_there_is_not(training, what):
    training.started = training.now
    training.now += 1.0
    training.progress.aside(what)
    assert training.after(9.0).doing == "wait", "the operation is from before"
    training.started, training.host = None, ("checkpoint", training.now)
    beat = training.after(16.0)
    assert (beat.doing, beat.where, beat.since_s) == ("wait", "checkpoint", 16.0)
    training.host = None
    beat = training.after(0.5)
    assert (beat.doing, beat.where, beat.since_s) == ("aside", what, 0.0), "its work counts from the last wait on"
    assert training.after(200.0).since_s == 200.0
    with training.progress.at("aside", "the other replicas"):
        training.started = training.now - 0.5
        assert training.after(20.0).doing == "wait", "the replica's own devices hang, not the other replicas"


def test_evaluations_saves_and_idle_times_are_no_part_of_a_step(training):
    assert training.after(2.0).at_step_s == 2.0
    training.progress.aside("save")
    assert training.after(500.0).at_step_s == 2.0
    training.progress.committed(5)
    assert training.after(1.0).at_step_s == 1.0
    with training.progress.at("aside", "quorum"):
        training.now += 50.0
    assert training.after(1.0).at_step_s == 2.0
    training.progress.idles("recovery")
    assert training.after(70.0).at_step_s == 0.0


def test_it_is_told_which_steps_can_be_compared(training):
    told, progress = [], training.progress
    progress.begun, progress.interrupted = told.append, lambda: told.append("interrupted")
    progress.committed(5)
    progress.aside("evaluate")
    progress.committed(6)
    progress.committed(6)  # the layer outside tells of it, too
    progress.committed(7, is_usual=False)
    progress.begins(7)  # an attempt has failed
    progress.committed(8)
    assert told == [True, "interrupted", True, False, False, True]


# --- the operations of steps, and which steps are compared ------------------------------------------------------------


def step(kept, names):
    for at, name in enumerate(names):
        kept.add(
            StartedOperation(name, "all_reduce", None, (), f"train.py:{name}", at + 1, time.monotonic(), lambda: None)
        )


def kind(kept):
    found = kept.departure()
    return None if found is None else found.kind


def test_a_step_is_compared_with_the_one_before():
    kept = History()
    step(kept, "abc")
    kept.begins()
    step(kept, "ac")
    assert kind(kept) == SKIPPED
    kept.begins()
    assert kind(kept) == SKIPPED, "the step before still departs"


@pytest.mark.parametrize("how", ["interrupted", "told when it ends"])
def test_a_step_with_an_evaluation_is_not_compared(how):
    kept = History()
    step(kept, "abc")
    kept.begins()
    step(kept, "abc")
    if how == "interrupted":
        kept.is_unusual()
    step(kept, "ev")
    assert kind(kept) == (ADDED if how != "interrupted" else None)
    kept.begins(is_usual=how == "interrupted")
    step(kept, "abc")
    assert kind(kept) is None
    kept.begins()
    step(kept, "ac")
    assert kind(kept) == SKIPPED, "the steps after it are compared again"


def test_after_a_recovery_a_step_is_compared_with_the_last_whole_one_before_it():
    kept = History()
    step(kept, "abc")
    kept.begins()
    step(kept, "a")
    for _ in range(2):  # the second attempt hangs, too
        kept.clears()
        step(kept, "repair")
        assert kind(kept) is None, "a repair is no step"
        kept.begins(is_usual=False)
        step(kept, "a")
        assert kind(kept) is None
        step(kept, "c")
        assert kind(kept) == SKIPPED
    kept.clears()
    kept.begins(is_usual=False)
    step(kept, "xyz")
    kept.begins()
    step(kept, "xyz")
    assert kind(kept) is None, "a whole step after the recovery takes its place"


def test_of_a_step_with_many_operations_the_newest_are_remembered(monkeypatch):
    monkeypatch.setattr(history, "_MOST", 4)
    kept = History()
    step(kept, "abcdefgh")
    gc.collect()
    pending = kept.operations(lambda entry: (entry.group != "h", entry.group == "h"))
    assert [one.group for one in pending if not one.done] == ["h"]
    kept.begins()
    assert "h" not in {one.group for one in kept.operations(lambda entry: (True, False))}
