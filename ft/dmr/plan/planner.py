"""The planner: a trace, a memory budget and options in; a plan out. No files, no clock, no chance."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ft.dmr.plan.agc import Inner, coarse
from ft.dmr.plan.assign import AgcSegment, Assignment, Plan, Predicted
from ft.dmr.plan.draft import Draft
from ft.dmr.plan.fine import fine
from ft.dmr.plan.online import serve
from ft.dmr.plan.piggyback import piggyback
from ft.dmr.plan.predict import Clock, everything_at_once
from ft.dmr.plan.trace import INTER, INTRA, Trace
from ft.errors import UserError

PHASES = 3

SMALL = 100
"""Operators per stage up to which it is worth asking whether the exact solver can do it."""


@dataclass(frozen=True)
class Options:
    """What the planner may use.

    Args:
        phases: 0 (all naive) to 3.
        kinds: of windows; SpareTrain uses all but bubbles.
    """

    phases: int = PHASES
    kinds: tuple[str, ...] = INTER + INTRA


def plan(trace: Trace, budget: float, options: Options | None = None) -> Plan:
    """Assigns every operator of the trace exactly once.

    Each number of phases keeps the best of what is known until there, so that a phase never makes an iteration longer.

    Args:
        trace: one iteration.
        budget: bytes that each stage may use, training included.
        options: default: all phases, all windows.

    Raises:
        UserError: training alone needs more than the budget.
    """
    options = options or Options()
    _enough(trace, budget)
    clock = Clock(trace)
    naive = everything_at_once(trace)
    none_us, naive_us = clock.none_us(), clock.time_us(naive)
    base = max((trace.memory.peak(stage) for stage in trace.stages), default=0.0)
    best = _Found(naive, {}, Predicted(none_us, naive_us, naive_us, clock.exposed_us(naive), base))
    attempts = [*_attempts(trace, budget, options), *_exactly(trace, budget, options)]
    reached = [best.predicted]
    for phase in range(1, options.phases + 1):
        for number, assign, segments, peak in attempts:
            if number == phase:
                exposed = clock.exposed_us(assign)
                predicted = Predicted(none_us, naive_us, clock.time_us(assign, segments), exposed, peak)
                best = min(best, _Found(assign, segments, predicted), key=_Found.rank)
        reached.append(best.predicted)
    kept = replace(trace, memory=replace(trace.memory, budget=budget))
    return Plan(kept, best.assign, best.segments, best.predicted, tuple(reached))


@dataclass(frozen=True)
class _Found:
    assign: Mapping[str, Assignment]
    segments: Mapping[str, AgcSegment]
    predicted: Predicted

    def rank(self) -> tuple[float, float]:
        """The fastest is the best; of equally fast ones, the one that hides more."""
        return self.predicted.t_plan, self.predicted.exposed_us


def _attempts(trace: Trace, budget: float, options: Options) -> Iterator:
    """(phases, assignments, AGC segments, peak memory) of several plans for each number of phases.

    Activations of AGC segments are kept in one, and regenerated in another, which is better where memory and not time
    is scarce; a third one leaves phase 2 out, for single operators may fill windows better.
    """
    for number, segments in ((1, None), (2, Inner.KEPT), (2, Inner.REGENERATED)):
        if number > options.phases:
            break
        drafts = [Draft(trace, stage, budget, options.kinds) for stage in trace.stages]
        for draft in drafts:
            piggyback(draft)
            if segments is not None:
                coarse(draft, segments)
        yield _completed(number, drafts)
        if options.phases == PHASES:
            for draft in drafts:
                # Windows of unknown length are for the planner at run time, which then has all windows to itself.
                (serve if any(window.dynamic for window in draft.windows) else fine)(draft)
            yield _completed(PHASES, drafts)


def _exactly(trace: Trace, budget: float, options: Options) -> Iterator:
    """As ``_attempts``: the plan that hides the most, if every stage is small and nothing is decided at run time."""
    drafts = [Draft(trace, stage, budget, options.kinds) for stage in trace.stages]
    if options.phases < PHASES or len(trace.ops) > SMALL * len(drafts) or trace.dynamic:
        return
    # SciPy's solvers take longer to import than a plan without them.
    from ft.dmr.plan.exact import exact

    for draft in drafts:
        piggyback(draft)
        if not exact(draft):
            return
    yield _completed(PHASES, drafts)


def _completed(number: int, drafts: Sequence[Draft]) -> tuple:
    assign = {name: how for draft in drafts for name, how in draft.completed().items()}
    segments = {name: one for draft in drafts for name, one in draft.segments.items()}
    return number, assign, segments, max((draft.holdings.peak for draft in drafts), default=0.0)


def _enough(trace: Trace, budget: float) -> None:
    for stage in trace.stages:
        needed = trace.memory.peak(stage)
        if needed > budget:
            problem = f"stage {stage} needs {needed / 1e9:.2f} GB without any verification, and the budget is "
            fix = f"give a --memory-budget of {needed / 1e9:.2f}GB or more, or split the model further"
            raise UserError(f"{problem}{budget / 1e9:.2f} GB", fix)
