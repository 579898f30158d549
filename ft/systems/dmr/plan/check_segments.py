"""Check whether the AGC segments of a plan can be replayed: inputs are kept or regenerated, and unchanged."""

import bisect
from collections import defaultdict
from collections.abc import Iterator, Mapping

from ft.systems.dmr.plan.assign import AgcSegment, Plan
from ft.systems.dmr.plan.trace import CLOSE_US, OPTIMIZER, RECOMPUTE, Operator, Trace, Window


class Changes:
    """The times at which tensors are changed in place, on each stage."""

    def __init__(self, trace: Trace):
        self._times: dict[tuple[int, str], list[float]] = defaultdict(list)
        for op in trace.ops:
            # "" stands for the parameters, which change when the optimizer of the stage begins.
            for name in (*op.checking.mutates, *([""] if op.place.phase == OPTIMIZER else [])):
                self._times[op.place.stage, name].append(op.start_us)
        for times in self._times.values():
            times.sort()

    def first(self, op: Operator, window: Window) -> str | None:
        """Return a tensor of ``op`` that is changed between it and the end of the window ("": the parameters)."""
        for name in (*op.tensors, ""):
            times = self._times.get((op.place.stage, name), ())
            place = bisect.bisect_left(times, op.end_us - CLOSE_US)
            if place < len(times) and times[place] < window.end_us - CLOSE_US:
                return name
        return None


def bad_segments(plan: Plan, changes: Changes) -> Iterator[str]:
    """Yield what is wrong with the AGC segments, one sentence each."""
    by_id = {op.id: op for op in plan.trace.ops}
    windows = {window.id: window for window in plan.trace.windows}
    recomputed: dict[tuple, list[Operator]] = defaultdict(list)
    for op in plan.trace.ops:
        if op.place.phase == RECOMPUTE:
            recomputed[_block(op)].append(op)
    for segment in plan.segments.values():
        name = f"AGC segment {segment.id!r}"
        yield from (f"{name} {problem}" for problem in _inconsistent(plan, segment, by_id, windows))
        ops = [by_id[each] for each in segment.ops if each in by_id]
        if ops and segment.window in windows:
            replayed = _replayed(segment, ops, recomputed)
            for problem in _not_replayable(segment, ops, replayed, windows[segment.window], changes):
                yield f"{name} {problem}"


def _block(op: Operator) -> tuple:
    place = op.place
    return place.stage, place.microbatch, place.chunk, place.layer


def _inconsistent(
    plan: Plan, segment: AgcSegment, by_id: Mapping[str, Operator], windows: Mapping[str, Window]
) -> Iterator[str]:
    if segment.window not in windows:
        yield f"is deferred to a window {segment.window!r} that the plan does not list"
    if not segment.ops:
        yield "has no operators"
    if len(set(segment.ops)) < len(segment.ops):
        yield "has an operator twice"
    for name in segment.ops:
        how = plan.assign.get(name)
        if how is None or how.agc_segment != segment.id or how.window != segment.window:
            yield f"has operator {name!r}, which is assigned otherwise"
    for name in segment.keeps:
        if name not in plan.trace.tensors:
            yield f"keeps a tensor {name!r} that the plan does not list"
    least = sum(by_id[name].check_us for name in segment.ops if name in by_id) + segment.regenerated_us
    if segment.load_us < least - CLOSE_US:
        yield f"is said to take {segment.load_us:.3f} us, and takes {least:.3f}"


def _replayed(segment: AgcSegment, ops: list[Operator], recomputed: Mapping[tuple, list[Operator]]) -> list[Operator]:
    """Return the operators of the block's recomputation that are executed again before the segment: up to the last one
    whose result the segment reads and does not keep."""
    inside = {name for op in ops for name in op.out_ids}
    missing = {name for op in ops for name in op.in_ids} - inside - set(segment.keeps)
    again = recomputed.get(_block(ops[0]), []) if segment.regenerated_us else []
    last = max((i for i, op in enumerate(again) if missing & set(op.out_ids)), default=-1)
    return again[: last + 1]


def _not_replayable(
    segment: AgcSegment, ops: list[Operator], replayed: list[Operator], window: Window, changes: Changes
) -> Iterator[str]:
    there = set(segment.keeps)
    for op in (*replayed, *ops):
        for name in op.in_ids:
            if name not in there:
                yield f"needs a tensor {name!r} for operator {op.id!r}, which it neither keeps nor makes"
        there |= set(op.out_ids)
    takes = sum(op.t_us for op in replayed)
    if takes > segment.regenerated_us + CLOSE_US:
        yield f"regenerates for {takes:.3f} us, and is said to do so for {segment.regenerated_us:.3f}"
    for op in replayed:
        changed = changes.first(op, window)
        if changed is not None:
            yield f"executes operator {op.id!r} again beyond a change of {changed or 'the parameters'!r}"
        if op.checking.mutates or not op.checking.deterministic:
            yield f"executes operator {op.id!r} again, which cannot be repeated"
