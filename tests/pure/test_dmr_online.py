"""The planner at run time: what waits, what windows take, and what memory forces."""

import math
import random

import pytest
from dmr_traces import pipeline_trace, random_trace
from msgspec.structs import replace

from ft.systems.dmr.plan.check import problems
from ft.systems.dmr.plan.online import Entry, Waiting
from ft.systems.dmr.plan.planner import Options, plan
from ft.systems.dmr.plan.trace import D_INTRA, NAIVE, Memory, Operator, Tensor, Trace, Window
from ft.systems.schedule.kinds import Pipeline


def test_what_uses_a_tensor_is_executed_before_it_changes():
    waiting = Waiting()
    for entry in (Entry("a", 5.0, 100.0), Entry("b", 30.0, 100.0), Entry("c", 10.0, 50.0)):
        waiting.put(entry)
    assert [waiting.take(op).key for op in ("a", "c")] == ["a", "c"] and [one.key for one in waiting] == ["b"]
    assert waiting.held == 100.0


def test_what_never_fits_does_not_crowd_out_what_does():
    tensors, ops, windows, now = {}, [], [], 0.0
    for i in range(40):
        length = 100.0 if i % 4 == 0 else 10.0
        tensors[f"t{i}"] = Tensor(10.0, now + length)
        ops.append(Operator(f"o{i}", "mm", "backward", now, length, (), (f"t{i}",)))
        now += length
        windows.append(Window(f"w{i}", now, 10.0, "ep", dynamic=True))
        now += 10.0
    trace = Trace({}, tuple(ops), tensors, tuple(windows), Memory({}))
    # Ten long ones that fit no window, and memory for four.
    assert plan(trace, 40.0).predicted.exposed_us == 1000.0


def test_a_queue_that_lives_on_decides_as_one_that_is_looked_at_anew_each_time():
    seed = random.randrange(10**6)
    print("seed", seed)
    rng = random.Random(seed)
    for _ in range(40):
        waiting, entries = Waiting(), []
        for i in range(80):
            what, limit = rng.randrange(5), rng.choice((0.0, 8.0, 20.0, math.inf))
            if what <= 1:
                entry = Entry(f"o{i}", rng.choice((0.0, 5.0, rng.uniform(0, 20))), rng.choice((0.0, 40.0, 7.0)))
                waiting.put(entry)
                entries.append(entry)
                taken, expected = [], []
            elif what == 2:
                headroom = rng.choice((0.0, 60.0, 200.0))
                taken, expected = waiting.press(headroom, limit), _pressed(entries, headroom, limit)
            elif what == 3:
                taken, left = waiting.fill(limit if limit < math.inf else 30.0), limit if limit < math.inf else 30.0
                expected = []
                for entry in sorted(entries, key=lambda entry: -entry.check_us):
                    if entry.check_us <= left:
                        expected.append(entry)
                        left -= entry.check_us
            else:
                taken = [one] if (one := waiting.oldest(limit)) is not None else []
                expected = [entry for entry in entries if entry.check_us <= limit][:1]
            assert taken == expected
            entries = [entry for entry in entries if entry not in taken]
            assert list(waiting) == entries and len(waiting) == len(entries)
            assert waiting.held == sum(entry.bytes for entry in entries)


def _pressed(entries, headroom, longest_us):
    forced, held = [], sum(entry.bytes for entry in entries)
    holding = sorted((entry for entry in entries if entry.bytes), key=lambda entry: (entry.check_us, entry.key))
    while held > headroom and holding:
        entry = holding.pop() if holding[-1].check_us > longest_us else holding.pop(0)
        held -= entry.bytes
        forced.append(entry)
    return forced


def test_in_a_trace_of_dynamic_windows_they_are_used_and_nothing_is_overrun():
    trace = pipeline_trace(Pipeline(2, 4, comm_us=5.0), tp_us=15.0, moe=True)
    found = plan(trace, 6000.0)
    dynamic = {window.id for window in trace.windows if window.dynamic}
    used = [how for how in found.assign.values() if how.window in dynamic]
    assert used and {how.set for how in used} == {D_INTRA} and not list(problems(found))
    assert found.predicted.t_plan < plan(trace, 6000.0, Options(phases=2)).predicted.t_plan


@pytest.mark.parametrize("dynamic", [True, False])
def test_static_planning_leaves_dynamic_windows_to_the_run(dynamic):
    trace = random_trace(11, dynamic=False)
    windows = tuple(replace(window, dynamic=dynamic, kind="ep") for window in trace.windows)
    found = plan(replace(trace, windows=windows), 1e6, Options(phases=2))
    assert not any(how.window for how in found.assign.values()) and NAIVE in {how.set for how in found.assign.values()}
