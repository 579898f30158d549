"""What a worker remembers of the operations of its steps, and which steps are compared."""

import gc
import time

import pytest

from ft.faults.hang.inspection import ADDED, SKIPPED
from ft.state.groups import history
from ft.state.groups.history import History, StartedOperation


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
