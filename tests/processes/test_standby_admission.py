"""The check of a standby: what it finds, what it costs, and that a failing standby gets no logical rank."""

import threading
import time

import numpy
import pytest
from waiting import eventually

from ft.base.errors import ReplaceNodeError
from ft.state.snapshot import SnapshotServer
from ft.worker.session import Admission, examine


def flipped(array):
    """Return a copy with one bit flipped."""
    damaged = array.copy()
    damaged.reshape(-1).view(numpy.uint8)[-2] ^= 1
    return damaged


def test_a_sound_machine_passes_in_a_fraction_of_a_second():
    server = SnapshotServer("127.0.0.1", token="secret")
    try:
        reach = lambda: server.reach_itself(20.0)  # noqa: E731
        examine(reach)
        took = []
        for seed in range(5):
            began = time.thread_time()
            examine(reach, seed)
            took.append(time.thread_time() - began)
        assert min(took) < 1.0, took
    finally:
        server.close()


def wrong_once():
    """Return a multiplication whose second result is wrong."""
    turns = iter((False, True, False))
    return lambda left, right: flipped(left @ right) if next(turns, False) else left @ right


@pytest.mark.parametrize(
    ("does", "found"),
    [
        ({"multiply": wrong_once()}, "differs when it is computed twice"),
        ({"multiply": lambda left, right: flipped(left @ right)}, "a product of matrices is wrong"),
        ({"copy": flipped}, "a copy of 16 MiB has another checksum"),
    ],
)
def test_a_machine_that_computes_or_copies_wrongly_is_found(does, found):
    with pytest.raises(ReplaceNodeError, match=found):
        examine(lambda: None, **does)


def test_a_process_that_cannot_reach_itself_is_found_after_several_tries():
    server = SnapshotServer("127.0.0.1", token="secret")
    server.close()
    with pytest.raises(ReplaceNodeError, match="3 messages to itself were lost"):
        examine(lambda: server.reach_itself(2.0))
    answers = iter([ConnectionError("late"), None])

    def reach():
        if error := next(answers):
            raise error

    examine(reach)


def test_the_check_is_repeated_until_the_standby_has_a_rank():
    seeds, enough = [], threading.Event()

    def check(reach, seed):
        seeds.append(seed)
        if len(seeds) == 3:
            enough.set()

    admission = Admission(lambda: None, lambda error: None, 0.01, check)
    admission.start()
    assert enough.wait(20) and seeds[:3] == [0, 1, 2]
    admission.stop()


def test_a_failure_is_reported_once_and_not_after_the_standby_got_a_rank():
    failures, begun, goes_on = [], threading.Event(), threading.Event()

    def check(reach, seed):
        begun.set()
        goes_on.wait(20)
        raise ReplaceNodeError("it computes wrongly")

    late = Admission(lambda: None, failures.append, 0.01, check)
    late.start()
    assert begun.wait(20)
    late.stop()
    early = Admission(lambda: None, failures.append, 0.01, check)
    early.start()
    goes_on.set()
    eventually(lambda: failures)
    time.sleep(0.1)
    assert [str(error) for error in failures] == ["it computes wrongly"]
