"""Summarise a plan in numbers: how much is verified how, how full the windows are, and how much memory is kept."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from ft.systems.dmr.plan.assign import NAIVE, SETS, UNCHECKED, Plan
from ft.systems.dmr.plan.check import peaks
from ft.systems.dmr.plan.predict import exposed_us
from ft.systems.dmr.plan.trace import INTER, INTRA, OPTIMIZER

_FAR = 0.05
"""Share of an iteration by which the simulated schedule may differ from the trace without being reported."""


@dataclass(frozen=True)
class Share:
    """The operators of one set: their number, their own time, and the part of their verification that is not hidden."""

    set: str
    operators: int
    t_us: float
    exposed_us: float


@dataclass(frozen=True)
class Filling:
    """The windows of one kind: their number, their total duration, and the used part of it."""

    kind: str
    windows: int
    dur_us: float
    used_us: float


def shares(plan: Plan) -> list[Share]:
    """Return every set that has operators, in the order of SETS."""
    found: dict[str, list[float]] = defaultdict(lambda: [0, 0.0, 0.0])
    for op in plan.trace.ops:
        how = plan.assign[op.id]
        sums = found[how.set]
        sums[0] += 1
        sums[1] += op.t_us
        sums[2] += exposed_us(plan.trace, op, how)
    return [Share(name, int(found[name][0]), *found[name][1:]) for name in SETS if name in found]


def fillings(plan: Plan) -> list[Filling]:
    """Return every kind of window that occurs."""
    used = loads(plan)
    found = []
    for kind in INTER + INTRA:
        windows = [window for window in plan.trace.windows if window.kind == kind]
        if windows:
            hidden = sum(used.get(window.id, 0.0) for window in windows)
            found.append(Filling(kind, len(windows), sum(window.dur_us for window in windows), hidden))
    return found


def loads(plan: Plan) -> dict[str, float]:
    """Return window id -> verification in it, in microseconds."""
    used: dict[str, float] = defaultdict(float)
    for op in plan.trace.ops:
        how = plan.assign[op.id]
        if how.window is not None and how.agc_segment is None:
            used[how.window] += op.check_us
    for segment in plan.segments.values():
        used[segment.window] += segment.load_us
    return dict(used)


def peak_by_stage(plan: Plan) -> dict[int, tuple[float, float]]:
    """Return stage -> peak memory in bytes: (of training alone, including what the plan keeps)."""
    with_plan = peaks(plan, {window.id: window for window in plan.trace.windows})
    alone = {stage: plan.trace.memory.peak(stage) for stage in plan.trace.stages}
    return {stage: (alone[stage], with_plan.get(stage, alone[stage])) for stage in plan.trace.stages}


def reasons(plan: Plan) -> Iterator[str]:
    """Yield the reasons why verification is not hidden, one sentence each."""
    at_once = [op for op in plan.trace.ops if plan.assign[op.id].set == NAIVE]
    forced = [op for op in at_once if op.checking.mutates or op.place.phase == OPTIMIZER]
    if forced:
        yield f"{len(forced)} operators change what they read, the optimizer's among them: verified at once"
    left = [op for op in at_once if not (op.checking.mutates or op.place.phase == OPTIMIZER)]
    free = {each.kind: each.dur_us - each.used_us for each in fillings(plan)}
    if left:
        total = sum(op.check_us for op in left)
        yield f"{len(left)} operators ({total:.0f} us) found no window with time and memory: verified at once"
        room = ", ".join(f"{kind} {us:.0f} us" for kind, us in free.items()) or "none: there is no idle time"
        yield f"idle time left: {room} (before anything is executed, too short, or beyond the memory budget)"
    took = max((each.end_us for each in (*plan.trace.ops, *plan.trace.windows)), default=0.0)
    if plan.trace.pipeline is not None and abs(took - plan.predicted.t_none) > _FAR * took:
        said = (
            f"the schedule played through takes {plan.predicted.t_none:.0f} us, and in the trace it took {took:.0f} us"
        )
        yield f"{said}: it has idle times that are no windows of it"
    lost = [op for op in plan.trace.ops if plan.assign[op.id].set == UNCHECKED]
    if lost:
        names = ", ".join(sorted({op.name for op in lost})[:5])
        yield f"NOT verified: {len(lost)} operators that are not reproducible ({names}); see --deterministic-mode"
