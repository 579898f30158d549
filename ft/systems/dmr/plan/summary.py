"""Summarise a DMR plan in numbers, for the tables and pictures that show a plan.

DMR (dual modular redundancy, SpareTrain) verifies an operator by executing it a second time. A plan assigns each
operator to a *set*, its way of verification. Second executions that are deferred to a *window*, a time in which the
stage communicates or is idle, are hidden: they do not lengthen the iteration.
"""

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
    """The operators of one set.

    Attributes:
        set: the set, one of SETS.
        operators: number of the operators.
        t_us: their total duration without verification, in microseconds.
        exposed_us: the verification time that is not hidden, in microseconds.
    """

    set: str
    operators: int
    t_us: float
    exposed_us: float


@dataclass(frozen=True)
class Filling:
    """The windows of one kind.

    Attributes:
        kind: the kind, one of INTER or INTRA.
        windows: number of the windows.
        dur_us: their total duration, in microseconds.
        used_us: verification time in them, in microseconds.
    """

    kind: str
    windows: int
    dur_us: float
    used_us: float


def shares(plan: Plan) -> list[Share]:
    """Return a ``Share`` for every set that has operators, in the order of SETS."""
    found: dict[str, list[float]] = defaultdict(lambda: [0, 0.0, 0.0])
    for op in plan.trace.ops:
        how = plan.assign[op.id]
        sums = found[how.set]
        sums[0] += 1
        sums[1] += op.t_us
        sums[2] += exposed_us(plan.trace, op, how)
    return [Share(name, int(found[name][0]), *found[name][1:]) for name in SETS if name in found]


def fillings(plan: Plan) -> list[Filling]:
    """Return a ``Filling`` for every kind of window that occurs in the plan."""
    used = loads(plan)
    found = []
    for kind in INTER + INTRA:
        windows = [window for window in plan.trace.windows if window.kind == kind]
        if windows:
            hidden = sum(used.get(window.id, 0.0) for window in windows)
            found.append(Filling(kind, len(windows), sum(window.dur_us for window in windows), hidden))
    return found


def loads(plan: Plan) -> dict[str, float]:
    """Return window id -> verification time that the plan puts into the window, in microseconds."""
    used: dict[str, float] = defaultdict(float)
    for op in plan.trace.ops:
        how = plan.assign[op.id]
        if how.window is not None and how.agc_segment is None:
            used[how.window] += op.check_us
    for segment in plan.segments.values():
        used[segment.window] += segment.load_us
    return dict(used)


def peak_by_stage(plan: Plan) -> dict[int, tuple[float, float]]:
    """Return stage -> (peak memory of training without DMR, peak memory with the plan), in bytes."""
    with_plan = peaks(plan, {window.id: window for window in plan.trace.windows})
    alone = {stage: plan.trace.memory.peak(stage) for stage in plan.trace.stages}
    return {stage: (alone[stage], with_plan.get(stage, alone[stage])) for stage in plan.trace.stages}


def reasons(plan: Plan) -> Iterator[str]:
    """Yield the reasons why some verification is not hidden or some operators are not verified, one sentence each."""
    at_once = [op for op in plan.trace.ops if plan.assign[op.id].set == NAIVE]
    forced = [op for op in at_once if op.checking.mutates or op.place.phase == OPTIMIZER]
    if forced:
        yield f"{len(forced)} operators change their inputs, the optimizer's included: verified at once"
    left = [op for op in at_once if not (op.checking.mutates or op.place.phase == OPTIMIZER)]
    free = {each.kind: each.dur_us - each.used_us for each in fillings(plan)}
    if left:
        total = sum(op.check_us for op in left)
        yield f"{len(left)} operators ({total:.0f} us) found no window with time and memory: verified at once"
        room = ", ".join(f"{kind} {us:.0f} us" for kind, us in free.items()) or "none: there is no idle time"
        yield f"idle time left: {room} (before anything is executed, too short, or beyond the memory budget)"
    took = max((each.end_us for each in (*plan.trace.ops, *plan.trace.windows)), default=0.0)
    if plan.trace.pipeline is not None and abs(took - plan.predicted.t_none) > _FAR * took:
        said = f"the simulated schedule takes {plan.predicted.t_none:.0f} us, and in the trace it took {took:.0f} us"
        yield f"{said}: it has idle times that are no windows of it"
    lost = [op for op in plan.trace.ops if plan.assign[op.id].set == UNCHECKED]
    if lost:
        names = ", ".join(sorted({op.name for op in lost})[:5])
        yield f"NOT verified: {len(lost)} operators that are not reproducible ({names}); see --deterministic-mode"
