"""The DMR planner: a pure function from a trace, a memory budget and options to a plan.

The plan says for each operator of the trace when it is executed a second time: with activation recomputation (phase 1),
in a window, a time in which its stage communicates or is idle (phases 2 and 3, ``ft.systems.dmr.plan.phases``), or
immediately (naive). Several plans are made, because no single order of choices is the best for every iteration, and the
best is returned.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from ft.base.errors import UserError
from ft.systems.dmr.plan.check import peaks, problems
from ft.systems.dmr.plan.online import serve
from ft.systems.dmr.plan.phases import Draft, InnerActivations, coarse, fine, piggyback
from ft.systems.dmr.plan.predict import Clock, everything_at_once
from ft.systems.dmr.plan.trace import INTER, INTRA, AgcSegment, Assignment, Plan, Predicted, Trace

PHASES = 3
"""Number of planning phases."""


@dataclass(frozen=True)
class PlanPart:
    """The part of a plan that belongs to one stage (or to all stages). ``peak``: peak memory, in bytes."""

    assign: Mapping[str, Assignment]
    segments: Mapping[str, AgcSegment]
    peak: float


def attempts(trace: Trace, budget: float, phases: int, kinds: Sequence[str]) -> Iterator[tuple[int, list[PlanPart]]]:
    """Yield several plans, each as (number of planning phases that it uses, a part for each stage).

    One plan keeps the activations inside AGC segments that come from a recomputation. Another plan regenerates them,
    which is better where memory and not time is scarce. A third plan leaves out phase 2, because single operators may
    fill windows better.
    """
    for number, inner in ((1, None), (2, InnerActivations.KEPT), (2, InnerActivations.REGENERATED)):
        if number > phases:
            return
        drafts = _begun(trace, budget, kinds)
        if inner is not None:
            for draft in drafts:
                coarse(draft, inner)
        yield number, _parts(drafts)
        if phases == PHASES:
            for draft in drafts:
                # Windows of unknown length (dynamic ones) can only be filled by decisions at run time (``serve``
                # simulates them). The run-time planner then fills all windows, the others too.
                (serve if any(window.dynamic for window in draft.windows) else fine)(draft)
            yield PHASES, _parts(drafts)


def _begun(trace: Trace, budget: float, kinds: Sequence[str]) -> list[Draft]:
    drafts = [Draft(trace, stage, budget, kinds) for stage in trace.stages]
    for draft in drafts:
        piggyback(draft)
    return drafts


def _parts(drafts: list[Draft]) -> list[PlanPart]:
    return [PlanPart(draft.completed(), dict(draft.segments), draft.holdings.peak) for draft in drafts]


@dataclass(frozen=True)
class PlannerOptions:
    """Restrictions of the planner.

    Args:
        phases: number of phases, 0 (all operators naive) to 3.
        kinds: kinds of windows that may be used. SpareTrain uses all kinds except bubbles.
    """

    phases: int = PHASES
    kinds: tuple[str, ...] = INTER + INTRA


def plan(trace: Trace, budget: float, options: PlannerOptions | None = None, known: Sequence[Plan] = ()) -> Plan:
    """Return the plan for a trace, in which every operator is assigned exactly once.

    The best plan with n phases is also a candidate for n + 1 phases, so that a phase never makes an iteration longer.

    Args:
        trace: one iteration.
        budget: bytes that each stage may use, training included.
        options: restrictions; None for all phases and all kinds of windows.
        known: earlier plans of the same operators, for example for less memory or shorter windows. With all phases, the
            new plan is never worse than an earlier plan that can still be followed and uses only windows of these
            kinds. (Without earlier plans, more memory may give a plan that hides up to one operator less, because
            stages are planned greedily.)

    Raises:
        UserError: training without DMR needs more than the budget.
    """
    options = options or PlannerOptions()
    _enough(trace, budget)
    kept = replace(trace, memory=replace(trace.memory, budget=budget))
    clock = Clock(trace)
    naive = everything_at_once(trace)
    base = max((trace.memory.peak(stage) for stage in trace.stages), default=0.0)
    by_phase: dict[int, list[list[PlanPart]]] = {phase: [] for phase in range(options.phases + 1)}
    by_phase[0].append([PlanPart(naive, {}, base)])
    for phase, parts in attempts(trace, budget, options.phases, options.kinds):
        by_phase[phase].append(parts)
    if options.phases == PHASES:
        by_phase[PHASES] += [[part] for each in known if (part := _still(kept, each, options.kinds)) is not None]
    times = (clock.none_us(), clock.time_us(naive))
    best, reached = None, []
    for phase, candidates in by_phase.items():
        if phase:
            candidates.append(_best_of_each_stage(candidates, clock))
        for parts in candidates:
            found = _found(kept, parts, clock, times)
            best = found if best is None else min(best, found, key=_rank)
        reached.append(best.predicted)
    return replace(best, phases=tuple(reached))


def _rank(plan: Plan) -> tuple[float, float]:
    """Return the sorting key, lowest first: the duration of the iteration, then the verification time outside of
    windows."""
    return plan.predicted.t_plan, plan.predicted.exposed_us


def _found(trace: Trace, parts: Sequence[PlanPart], clock: Clock, times: tuple[float, float]) -> Plan:
    assign = {name: how for part in parts for name, how in part.assign.items()}
    segments = {name: one for part in parts for name, one in part.segments.items()}
    peak = max((part.peak for part in parts), default=0.0)
    predicted = Predicted(*times, clock.time_us(assign, segments), clock.exposed_us(assign), peak)
    return Plan(trace, assign, segments, predicted)


def _best_of_each_stage(candidates: Sequence[Sequence[PlanPart]], clock: Clock) -> list[PlanPart]:
    """Return for each stage the part with the least verification time outside of windows. Candidates that do not have
    one part for each stage are left out."""
    stages = max(map(len, candidates))
    whole = [parts for parts in candidates if len(parts) == stages]
    return [min(parts, key=lambda part: clock.exposed_us(part.assign)) for parts in zip(*whole, strict=True)]


def _still(trace: Trace, known: Plan, kinds: Sequence[str]) -> PlanPart | None:
    """Return an earlier plan as a part for all stages of this trace; None if it cannot be followed here, or if it uses
    windows of other kinds than ``kinds``."""
    moved = replace(known, trace=trace)
    unwanted = {window.id for window in trace.windows if window.kind not in kinds}
    if any(how.window in unwanted for how in known.assign.values()) or any(problems(moved)):
        return None
    return PlanPart(known.assign, known.segments, max(peaks(moved).values(), default=0.0))


def _enough(trace: Trace, budget: float) -> None:
    for stage in trace.stages:
        needed = trace.memory.peak(stage)
        if needed > budget:
            problem = f"stage {stage} needs {needed / 1e9:.3g} GB without any verification, and the budget is "
            fix = f"give a --memory-budget of {math.ceil(needed / 1e6)}MB or more, or split the model further"
            raise UserError(f"{problem}{budget / 1e9:.3g} GB", fix)
