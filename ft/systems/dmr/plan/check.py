"""Check whether a DMR plan can be followed: its sets, windows, memory and AGC segments.

Every plan that is read is checked, because it may have been edited or belong to another run. Memory is computed here
operator by operator and instant by instant, independently of the planner.
"""

from collections import defaultdict
from collections.abc import Iterator

from ft.systems.dmr.plan.phases import executed_twice, executes_last_again
from ft.systems.dmr.plan.trace import (
    CLOSE_US,
    D_INTER,
    D_INTRA,
    PIGGYBACK,
    RECOMPUTE,
    UNCHECKED,
    AgcSegment,
    Assignment,
    Changes,
    Operator,
    Plan,
    Window,
    deferred_set,
    rooms,
)


def _bad_segments(plan: Plan, changes: Changes) -> Iterator[str]:
    """Yield each problem of the plan's AGC segments as one sentence."""
    for name, segment in plan.segments.items():
        for problem in (*_inconsistent(plan, name, segment), *_not_replayable(plan, segment, changes)):
            yield f"AGC segment {name!r} {problem}"


def _inconsistent(plan: Plan, name: str, segment: AgcSegment) -> Iterator[str]:
    ops = plan.trace.op_by_id
    if segment.window not in plan.trace.window_by_id:
        yield f"is deferred to a window {segment.window!r} that the plan does not list"
    if not segment.ops:
        yield "has no operators"
    if len(set(segment.ops)) < len(segment.ops):
        yield "has an operator twice"
    for each in segment.ops:
        how = plan.assign.get(each)
        if how is None or how.agc_segment != name or how.window != segment.window:
            yield f"has operator {each!r}, which is assigned otherwise"
    for each in segment.again:
        if each not in ops or ops[each].phase != RECOMPUTE:
            yield f"executes operator {each!r} again, which is none of a recomputation"
    for each in segment.keeps:
        if each not in plan.trace.tensors:
            yield f"keeps a tensor {each!r} that the plan does not list"
    least = sum(ops[each].check_us for each in segment.ops if each in ops)
    least += sum(ops[each].t_us for each in segment.again if each in ops)
    if segment.load_us < least - CLOSE_US:
        yield f"is said to take {segment.load_us:.3f} us, and takes {least:.3f}"


def _not_replayable(plan: Plan, segment: AgcSegment, changes: Changes) -> Iterator[str]:
    known, window = plan.trace.op_by_id, plan.trace.window_by_id.get(segment.window)
    ops, again = ([known[name] for name in names if name in known] for names in (segment.ops, segment.again))
    if not ops or window is None:
        return
    there = set(segment.keeps)
    for op in (*again, *ops):
        for name in op.in_ids:
            if name not in there:
                yield f"needs a tensor {name!r} for operator {op.id!r}, which it neither keeps nor makes"
        there |= set(op.out_ids)
    for op in again:
        changed_us, changed = changes.next(op)
        if changed_us < window.end_us - CLOSE_US:
            yield f"executes operator {op.id!r} again beyond a change of {changed or 'the parameters'!r}"
        if op.mutates or not op.deterministic or op.stage != window.stage:
            yield f"executes operator {op.id!r} again, which cannot be repeated"


def problems(plan: Plan) -> Iterator[str]:
    """Yield each problem of the plan as one sentence, as soon as it is found; nothing if the plan can be followed."""
    yield from _incomplete(plan)
    windows, changes = plan.trace.window_by_id, Changes(plan.trace.ops)
    twice = executed_twice(plan.trace.ops)
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
    yield from _bad_segments(plan, changes)
    yield from _overfull_windows(plan)
    yield from _too_much_memory(plan)


def _incomplete(plan: Plan) -> Iterator[str]:
    known = plan.trace.op_by_id
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
    if how.set in (D_INTER, D_INTRA) and op.is_verified_at_once:
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
    changed_us, tensor = changes.next(op)
    if changed_us < window.end_us - CLOSE_US:
        yield f"{name} is deferred beyond a change of {tensor or 'the parameters'!r}"


def loads(plan: Plan) -> dict[str, float]:
    """Return window id -> verification time that the plan puts into the window, in microseconds."""
    used: dict[str, float] = defaultdict(float)
    for op in plan.trace.ops:
        how = plan.assign.get(op.id)
        if how is not None and how.window is not None and how.agc_segment is None:
            used[how.window] += op.check_us
    for segment in plan.segments.values():
        used[segment.window] += segment.load_us
    return dict(used)


def _overfull_windows(plan: Plan) -> Iterator[str]:
    load, windows = loads(plan), plan.trace.window_by_id
    for name, room in rooms(windows[name] for name, taken in load.items() if taken and name in windows).items():
        if load[name] > room + CLOSE_US:
            yield f"window {name!r} has room for {room:.3f} us of verification, and is assigned {load[name]:.3f} us"


def _too_much_memory(plan: Plan) -> Iterator[str]:
    budget = plan.trace.memory.budget
    if budget is None:
        yield "the plan has no memory budget"
        return
    for stage, peak in peaks(plan).items():
        if peak > budget * (1 + 1e-9):
            yield f"stage {stage} would use {peak / 1e9:.3f} GB, and the plan's budget is {budget / 1e9:.3f} GB"


def peaks(plan: Plan) -> dict[int, float]:
    """Return stage -> peak memory in bytes, including the tensors that the plan keeps for deferred verifications."""
    return {stage: max((level for _, level in points), default=0.0) for stage, points in memory_over_time(plan).items()}


def memory_over_time(plan: Plan) -> dict[int, list[tuple[float, float]]]:
    """Return stage -> its memory as (time in microseconds, bytes in use from then on), in order of time. Bytes in use
    include the tensors that the plan keeps for deferred verifications."""
    return {stage: list(_levels(each)) for stage, each in _memory_changes(plan).items()}


def _memory_changes(plan: Plan) -> dict[int, list[tuple[float, float]]]:
    """Return stage -> (time in microseconds, change of the memory in use in bytes), in no particular order."""
    windows, until = plan.trace.window_by_id, dict[tuple[int, str], float]()
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
