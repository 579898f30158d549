"""What a verification may execute again and when: counterparts, regenerated activations, windows; and the planner at
run time: what waits, what windows take, and what memory forces."""

import math
import random

import pytest
from dmr_traces import pipeline_trace, random_trace
from msgspec.structs import replace

from ft.systems.dmr.plan.check import problems
from ft.systems.dmr.plan.online import DeferredCheck, DeferredQueue
from ft.systems.dmr.plan.phases import TensorGraph
from ft.systems.dmr.plan.planner import PlannerOptions, plan
from ft.systems.dmr.plan.trace import (
    BACKWARD,
    D_INTRA,
    FORWARD,
    NAIVE,
    PIGGYBACK,
    RECOMPUTE,
    MemoryInUse,
    Operator,
    Tensor,
    Trace,
    Window,
    rooms,
)
from ft.systems.schedule.kinds import Pipeline


def segment_trace(forward: str, recomputed: str, early_stop: bool = False) -> Trace:
    """A segment whose forward and recomputation have operators of these names, one letter and 10 us each."""
    ops = []
    for phase, names in ((FORWARD, forward), (RECOMPUTE, recomputed)):
        for i, name in enumerate(names):
            segment = {"ac_segment": "s", "is_segment_last": phase == FORWARD and i == len(names) - 1}
            start = 10.0 * len(ops)
            ops.append(Operator(f"{phase}{i}", name, phase, start, 10.0, **segment))
    return Trace({}, tuple(ops), {}, (), MemoryInUse({}), None, early_stop)


@pytest.mark.parametrize(
    "forward, recomputed, early_stop, at_once",
    [
        ("abcd", "abcd", False, set()),
        # Recomputation ends where the backward needs nothing more; only the last operator is executed once more.
        ("abcd", "ab", True, {"forward2"}),
        ("abcd", "ab", False, {"forward2", "forward3"}),
        # A forward without gradients may consist of other operators.
        ("abc", "axc", False, {"forward1", "recompute1"}),
        ("aa", "aaa", False, {"recompute2"}),
    ],
)
def test_only_what_the_recomputation_executes_too_is_verified_by_it(forward, recomputed, early_stop, at_once):
    found = plan(segment_trace(forward, recomputed, early_stop), 0.0)
    assert {name for name, how in found.assign.items() if how.set == NAIVE} == at_once
    assert not list(problems(found))
    claimed = replace(found, assign={name: replace(how, set=PIGGYBACK) for name, how in found.assign.items()})
    assert sum("nothing recomputes it" in problem for problem in problems(claimed)) == len(at_once)


@pytest.mark.parametrize(
    "changed, set_of_it",
    [
        # New memory in each execution: both find the same there.
        (("mine", "again"), PIGGYBACK),
        # A counter, which goes on in the recomputation.
        (("counter", "counter"), NAIVE),
        (("mine", "w"), NAIVE),
    ],
)
def test_what_changes_a_tensor_is_verified_by_the_recomputation_if_that_is_its_own(changed, set_of_it):
    trace = segment_trace("abc", "abc")
    ops = list(trace.ops)
    for i, name in zip((1, 4), changed, strict=True):
        ops[i] = replace(ops[i], mutates=(name,))
    ops.append(Operator("end", "add_", BACKWARD, 60.0, 1.0, mutates=("w",)))
    found = plan(replace(trace, ops=tuple(ops)), 0.0)
    assert {found.assign[ops[i].id].set for i in (1, 4)} == {set_of_it}
    assert {found.assign[ops[i].id].set for i in (0, 2, 3, 5)} == {PIGGYBACK} and not list(problems(found))
    claimed = {ops[i].id: replace(found.assign[ops[i].id], set=PIGGYBACK) for i in (1, 4)}
    wrong = list(problems(replace(found, assign=found.assign | claimed)))
    assert len(wrong) == (2 if set_of_it == NAIVE else 0)


@pytest.mark.parametrize("checking", [{"deterministic": False}, {"mutates": ("w",)}])
def test_activations_are_not_regenerated_by_operators_that_cannot_be_repeated(checking):
    trace = pipeline_trace(Pipeline(1, 1), layers=1, size=100.0, tp_us=0.0)
    trace = replace(trace, windows=(Window("late", 200.0, 200.0, "p2p"),))
    budget = trace.memory.peak(0) + 250.0
    [segment] = plan(trace, budget).segments.values()
    assert segment.again
    first = next(i for i, op in enumerate(trace.ops) if op.phase == RECOMPUTE)
    ops = list(trace.ops)
    ops[first] = replace(ops[first], **checking)
    found = plan(replace(trace, ops=tuple(ops)), budget)
    assert all(not segment.again for segment in found.segments.values()) and not list(problems(found))


def test_activations_are_not_regenerated_from_what_has_changed():
    trace = pipeline_trace(Pipeline(1, 1), layers=1, size=100.0, tp_us=0.0)
    end = max(op.end_us for op in trace.ops)
    # The block's input, which its recomputation reads and its backward does not, is overwritten behind the block.
    change = Operator("b", "add_", BACKWARD, end, 1.0, layer=1, mutates=("0.0.0.0.in",))
    trace = replace(trace, ops=(*trace.ops, change), windows=(Window("late", 210.0, 200.0, "p2p"),))
    found = plan(trace, trace.memory.peak(0) + 250.0)
    assert all(not segment.again for segment in found.segments.values()) and not list(problems(found))
    # Nor is a plan believed that does so.
    calm = plan(replace(trace, ops=trace.ops[:-1]), trace.memory.peak(0) + 250.0)
    assign = {**calm.assign, "b": found.assign["b"]}
    said = list(problems(replace(calm, trace=replace(trace, memory=calm.trace.memory), assign=assign)))
    assert any("again beyond a change of '0.0.0.0.in'" in problem for problem in said)


def test_time_that_windows_share_is_used_once():
    windows = (Window("a", 10.0, 30.0, "p2p"), Window("b", 20.0, 30.0, "tp"), Window("c", 25.0, 5.0, "tp"))
    assert rooms(windows) == {"a": 30.0, "b": 10.0, "c": 0.0}
    ops = tuple(Operator(f"o{i}", "mm", BACKWARD, 0.0, 10.0) for i in range(6))
    found = plan(Trace({}, ops, {}, windows, MemoryInUse({})), 0.0)
    assert found.predicted.exposed_us == 20.0 and not list(problems(found))
    both = {name: replace(how, set="D_intra", window="b") for name, how in found.assign.items() if how.window != "a"}
    assert any("window 'b' has" in problem for problem in problems(replace(found, assign=found.assign | both)))


def long_run(n: int, dynamic: bool, seed: int) -> Trace:
    """A profile that names no layers: ``n`` operators in a row, a window after every 500, a buffer changed often."""
    rng = random.Random(seed)
    tensors, ops, windows, now = {"w": Tensor(1e6), "buffer": Tensor(1e8)}, [], [], 0.0
    for i in range(n):
        length, changes = rng.uniform(5, 400), i % 7 == 0
        tensors[f"t{i}"] = Tensor(float(rng.randint(1, 4) * 2**20), now + length + rng.uniform(0, 20_000))
        reads = ("w", f"t{i - 1}") if i else ("w",)
        reads += ("buffer",) if changes or i % 5 == 0 else ()
        checking = {"compare_us": 1.0, "mutates": ("buffer",) if changes else ()}
        ops.append(Operator(f"o{i}", "mm", BACKWARD, now, length, reads, (f"t{i}",), **checking))
        now += length
        if i % 500 == 499:
            windows.append(Window(f"w{i}", now, rng.uniform(1e4, 1e5), "ep" if dynamic else "p2p", dynamic=dynamic))
            now += windows[-1].dur_us
    return Trace({}, tuple(ops), tensors, tuple(windows), MemoryInUse({0: ((0.0, 1e9),)}))


def check_long_run(n: int, dynamic: bool, seed: int) -> None:
    trace = long_run(n, dynamic, seed)
    tight, ample = plan(trace, 1.1e9), plan(trace, 1e15)
    for found in (tight, ample):
        assert not list(problems(found))
    assert ample.predicted.t_plan <= tight.predicted.t_plan < tight.predicted.t_naive


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_profile_that_names_no_layers_is_planned_too(dynamic, seed):
    check_long_run(2000, dynamic, seed)


@pytest.mark.long
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_profile_of_30_000_operators_is_planned_too(dynamic, seed):
    check_long_run(30_000, dynamic, seed)


def test_segments_of_a_run_come_longest_first_and_none_twice(seed):
    from ft.systems.dmr.plan.phases import _by_time

    rng = random.Random(seed)
    for _ in range(30):
        ops = [Operator(f"o{i}", "mm", FORWARD, 0.0, rng.choice((0.0, 1.0, rng.uniform(0, 9)))) for i in range(12)]
        runs, longest = [ops[:7], ops[7:]], rng.uniform(0, 40)
        found = [tuple(op.id for op in part) for _, part in _by_time(runs, longest)]
        sums = [sum(op.check_us for op in part) for _, part in _by_time(runs, longest)]
        assert sums == sorted(sums, reverse=True) or sums == pytest.approx(sorted(sums, reverse=True))
        parts = [run[a:b] for run in runs for a in range(len(run)) for b in range(a + 1, len(run) + 1)]
        fitting = {tuple(op.id for op in part) for part in parts if sum(op.check_us for op in part) <= longest + 1e-9}
        assert len(set(found)) == len(found) and set(found) <= fitting
        assert all(sum(op.check_us for op in part) > longest - 1e-9 for part in parts if _ids(part) not in set(found))


def _ids(part: list[Operator]) -> tuple[str, ...]:
    return tuple(op.id for op in part)


def test_a_graph_without_recomputation_regenerates_nothing():
    trace = pipeline_trace(Pipeline(1, 1), layers=1)
    ops = tuple(op for op in trace.ops if op.phase == BACKWARD)
    assert TensorGraph(ops).regenerated(ops) is None
    assert plan(replace(trace, ops=ops), 1e6, PlannerOptions(phases=2)).assign.keys() == {op.id for op in ops}


def test_what_uses_a_tensor_is_executed_before_it_changes():
    waiting = DeferredQueue()
    for entry in (DeferredCheck("a", 5.0, 100.0), DeferredCheck("b", 30.0, 100.0), DeferredCheck("c", 10.0, 50.0)):
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
    trace = Trace({}, tuple(ops), tensors, tuple(windows), MemoryInUse({}))
    # Ten long ones that fit no window, and memory for four.
    assert plan(trace, 40.0).predicted.exposed_us == 1000.0


def test_a_queue_that_lives_on_decides_as_one_that_is_looked_at_anew_each_time(seed):
    rng = random.Random(seed)
    for _ in range(40):
        waiting, entries = DeferredQueue(), []
        for i in range(80):
            what, limit = rng.randrange(5), rng.choice((0.0, 8.0, 20.0, math.inf))
            if what <= 1:
                entry = DeferredCheck(f"o{i}", rng.choice((0.0, 5.0, rng.uniform(0, 20))), rng.choice((0.0, 40.0, 7.0)))
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
    assert found.predicted.t_plan < plan(trace, 6000.0, PlannerOptions(phases=2)).predicted.t_plan


@pytest.mark.parametrize("dynamic", [True, False])
def test_static_planning_leaves_dynamic_windows_to_the_run(dynamic):
    trace = random_trace(11, dynamic=False)
    windows = tuple(replace(window, dynamic=dynamic, kind="ep") for window in trace.windows)
    found = plan(replace(trace, windows=windows), 1e6, PlannerOptions(phases=2))
    assert not any(how.window for how in found.assign.values()) and NAIVE in {how.set for how in found.assign.values()}
