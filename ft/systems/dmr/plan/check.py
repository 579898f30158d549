"""Check whether a DMR plan can be followed: its sets, windows, memory and AGC segments.

Every plan that is read is checked, because it may have been edited or belong to another run. Memory is computed here
operator by operator and instant by instant, independently of the planner.
"""

import bisect
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from ft.systems.dmr.plan.phases import executed_twice, executes_last_again
from ft.systems.dmr.plan.trace import (
    CLOSE_US,
    D_INTER,
    D_INTRA,
    OPTIMIZER,
    PIGGYBACK,
    RECOMPUTE,
    UNCHECKED,
    AgcSegment,
    Assignment,
    Operator,
    Plan,
    Trace,
    Window,
    deferred_set,
    rooms,
)


class Changes:
    """The times at which tensors are changed in place, on each stage."""

    def __init__(self, trace: Trace):
        self._times: dict[tuple[int, str], list[float]] = defaultdict(list)
        for op in trace.ops:
            # "" stands for the parameters, which change when the optimizer of the stage begins.
            for name in (*op.mutates, *([""] if op.phase == OPTIMIZER else [])):
                self._times[op.stage, name].append(op.start_us)
        for times in self._times.values():
            times.sort()

    def first(self, op: Operator, window: Window) -> str | None:
        """Return the name of a tensor of ``op`` that is changed in place between the end of ``op`` and the end of
        ``window``; "" stands for the parameters. Return None if no tensor is changed."""
        for name in (*op.tensors, ""):
            times = self._times.get((op.stage, name), ())
            place = bisect.bisect_left(times, op.end_us - CLOSE_US)
            if place < len(times) and times[place] < window.end_us - CLOSE_US:
                return name
        return None


def bad_segments(plan: Plan, changes: Changes) -> Iterator[str]:
    """Yield each problem of the plan's AGC segments as one sentence."""
    by_id = {op.id: op for op in plan.trace.ops}
    windows = {window.id: window for window in plan.trace.windows}
    again = recomputed(plan.trace)
    for segment in plan.segments.values():
        name = f"AGC segment {segment.id!r}"
        yield from (f"{name} {problem}" for problem in _inconsistent(plan, segment, by_id, windows))
        ops = [by_id[each] for each in segment.ops if each in by_id]
        if ops and segment.window in windows:
            for problem in _not_replayable(
                segment, ops, replayed(segment, ops, again), windows[segment.window], changes
            ):
                yield f"{name} {problem}"


def _block(op: Operator) -> tuple:
    return op.stage, op.microbatch, op.chunk, op.layer


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


def recomputed(trace: Trace) -> dict[tuple, list[Operator]]:
    """Return (stage, microbatch, chunk, layer) -> the operators of that block's activation recomputation, in order."""
    found: dict[tuple, list[Operator]] = defaultdict(list)
    for op in trace.ops:
        if op.phase == RECOMPUTE:
            found[_block(op)].append(op)
    return found


def replayed(
    segment: AgcSegment, ops: Sequence[Operator], recomputed: Mapping[tuple, list[Operator]]
) -> list[Operator]:
    """Return the operators of the block's recomputation that are executed again before the segment's ``ops``: those up
    to the last one whose result the segment reads and does not keep. Return none if nothing is regenerated."""
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
        if op.mutates or not op.deterministic:
            yield f"executes operator {op.id!r} again, which cannot be repeated"


def problems(plan: Plan) -> Iterator[str]:
    """Yield each problem of the plan as one sentence, as soon as it is found; nothing if the plan can be followed."""
    yield from _incomplete(plan)
    windows = {window.id: window for window in plan.trace.windows}
    twice = executed_twice(plan.trace.ops)
    changes = Changes(plan.trace)
    for op in plan.trace.ops:
        how = plan.assign.get(op.id)
        if how is None:
            continue
        yield from _wrong_set(op, how)
        if how.set == PIGGYBACK:
            again = executes_last_again(plan.trace.early_stop, op) and op.ac_segment in twice.segments
            if op.id not in twice.ops and (not again or op.mutates):
                yield f"operator {op.id!r} is in set P, but nothing recomputes it"
        elif how.set in (D_INTER, D_INTRA):
            if how.window not in windows:
                yield f"operator {op.id!r} is deferred to a window {how.window!r} that the plan does not list"
            elif how.agc_segment is not None and not (
                how.agc_segment in plan.segments and op.id in plan.segments[how.agc_segment].ops
            ):
                yield f"operator {op.id!r} is assigned to the AGC segment {how.agc_segment!r}, which does not list it"
            else:
                yield from _deferral_problems(op, how.set, windows[how.window], changes)
    yield from bad_segments(plan, changes)
    yield from _overfull_windows(plan, windows)
    yield from _too_much_memory(plan, windows)


def _incomplete(plan: Plan) -> Iterator[str]:
    known = {op.id for op in plan.trace.ops}
    for name in plan.assign:
        if name not in known:
            yield f"operator {name!r} is assigned, but the plan does not list it"
    for name in known:
        if name not in plan.assign:
            yield f"operator {name!r} is not assigned: it would go unverified"


def _wrong_set(op: Operator, how: Assignment) -> Iterator[str]:
    """Yield a problem if this operator cannot be in the set that it is assigned to, whatever else the plan says."""
    name = f"operator {op.id!r}"
    if how.set == UNCHECKED and op.deterministic:
        yield f"{name} is reproducible, and the plan leaves it unchecked"
    if how.set != UNCHECKED and not op.deterministic:
        yield f"{name} is not reproducible, and is in set {how.set} to be compared"
    if how.set in (D_INTER, D_INTRA) and (op.mutates or op.phase == OPTIMIZER):
        yield f"{name} changes what it reads, and must be verified at once"
    if how.set not in (D_INTER, D_INTRA) and (how.window or how.agc_segment) is not None:
        yield f"{name} is in set {how.set}, and has a window or an AGC segment besides"


def _deferral_problems(op: Operator, assigned: str, window: Window, changes: Changes) -> Iterator[str]:
    name = f"operator {op.id!r}"
    if window.stage != op.stage:
        yield f"{name} of stage {op.stage} is deferred to a window of stage {window.stage}"
    if assigned != deferred_set(window):
        yield f"{name} is in set {assigned}, but its window {window.id!r} is for set {deferred_set(window)}"
    if op.end_us > window.start_us + CLOSE_US:
        yield f"{name} is deferred to window {window.id!r}, which begins before it ends"
    tensor = changes.first(op, window)
    if tensor is not None:
        yield f"{name} is deferred beyond a change of {tensor or 'the parameters'!r}"


def _overfull_windows(plan: Plan, windows: dict[str, Window]) -> Iterator[str]:
    load: dict[str, float] = defaultdict(float)
    for op in plan.trace.ops:
        how = plan.assign.get(op.id)
        if how is not None and how.window is not None and how.agc_segment is None:
            load[how.window] += op.check_us
    for segment in plan.segments.values():
        load[segment.window] += segment.load_us
    for name, room in rooms(windows[name] for name, taken in load.items() if taken and name in windows).items():
        if load[name] > room + CLOSE_US:
            yield f"window {name!r} has room for {room:.3f} us of verification, and is assigned {load[name]:.3f} us"


def _too_much_memory(plan: Plan, windows: dict[str, Window]) -> Iterator[str]:
    budget = plan.trace.memory.budget
    if budget is None:
        yield "the plan has no memory budget"
        return
    for stage, peak in peaks(plan, windows).items():
        if peak > budget * (1 + 1e-9):
            yield f"stage {stage} would use {peak / 1e9:.3f} GB, and the plan's budget is {budget / 1e9:.3f} GB"


def peaks(plan: Plan, windows: dict[str, Window]) -> dict[int, float]:
    """Return stage -> peak memory in bytes, including the tensors that the plan keeps for deferred verifications."""
    changes = _memory_changes(plan, windows)
    return {stage: max((level for _, level in _levels(each)), default=0.0) for stage, each in changes.items()}


def memory_over_time(plan: Plan, stage: int) -> list[tuple[float, float]]:
    """Return the memory of one stage as (time in microseconds, bytes in use from then on), in order of time. Bytes in
    use include the tensors that the plan keeps for deferred verifications."""
    windows = {window.id: window for window in plan.trace.windows}
    return list(_levels(_memory_changes(plan, windows).get(stage, [])))


def _memory_changes(plan: Plan, windows: dict[str, Window]) -> dict[int, list[tuple[float, float]]]:
    """Return stage -> (time in microseconds, change of the memory in use in bytes), in no particular order."""
    until: dict[tuple[int, str], float] = {}
    for op in plan.trace.ops:
        how = plan.assign.get(op.id)
        if how is not None and how.window in windows:
            segment = plan.segments.get(how.agc_segment or "")
            for name in segment.keeps if segment else () if how.agc_segment else op.tensors:
                key = (op.stage, name)
                until[key] = max(until.get(key, 0.0), windows[how.window].end_us)
    changes: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for (stage, name), end in until.items():
        tensor = plan.trace.tensors.get(name)
        if tensor is not None and tensor.free_us is not None and tensor.free_us < end - CLOSE_US:
            changes[stage] += [(tensor.free_us, tensor.bytes), (end, -tensor.bytes)]
    for stage in plan.trace.stages:
        before = 0.0
        for at, live in plan.trace.memory.timeline.get(stage, ()):
            changes[stage].append((at, live - before))
            before = live
    return changes


def _levels(changes: list[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    """Yield (time, bytes in use) after each change; changes at most ``CLOSE_US`` after another count as one with it."""
    level, last = 0.0, None
    for at, change in sorted(changes):
        if last is not None and at > last + CLOSE_US:
            yield last, level
        level, last = level + change, at
    if last is not None:
        yield last, level
