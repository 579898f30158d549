"""The planner: a trace, a memory budget and options in; a plan out. No files, no clock, no chance."""

from dataclasses import dataclass, replace

from ft.dmr.plan.agc import coarse
from ft.dmr.plan.assign import Plan, Predicted
from ft.dmr.plan.draft import Draft
from ft.dmr.plan.fine import fine
from ft.dmr.plan.online import serve
from ft.dmr.plan.piggyback import piggyback
from ft.dmr.plan.predict import Clock, everything_at_once
from ft.dmr.plan.trace import INTER, INTRA, Trace
from ft.errors import UserError

PHASES = 3


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
    best = (naive, {}, Predicted(none_us, naive_us, naive_us, clock.exposed_us(naive), base))
    reached = [best[2]]
    for phases in range(1, options.phases + 1):
        for drafts in _attempts(trace, budget, options, phases):
            assign = {name: how for draft in drafts for name, how in draft.completed().items()}
            segments = {name: one for draft in drafts for name, one in draft.segments.items()}
            peak = max((draft.holdings.peak for draft in drafts), default=base)
            found = Predicted(none_us, naive_us, clock.time_us(assign, segments), clock.exposed_us(assign), peak)
            if _rank(found) < _rank(best[2]):
                best = (assign, segments, found)
        reached.append(best[2])
    kept = replace(trace, memory=replace(trace.memory, budget=budget))
    return Plan(kept, best[0], best[1], best[2], tuple(reached))


def _attempts(trace: Trace, budget: float, options: Options, phases: int):
    """Plans that this number of phases allows; with three, also without the second one: its segments take windows
    that single operators may fill better."""
    yield _drafts(trace, budget, options, {1, 2, 3} & set(range(1, phases + 1)))
    if phases == PHASES:
        yield _drafts(trace, budget, options, {1, 3})


def _drafts(trace: Trace, budget: float, options: Options, phases: set[int]) -> list[Draft]:
    drafts = [Draft(trace, stage, budget, options.kinds) for stage in trace.stages]
    for draft in drafts:
        piggyback(draft)
        if 2 in phases:
            coarse(draft)
        if 3 in phases:
            # Windows of unknown length are for the planner at run time, which then has all windows to itself.
            (serve if any(window.dynamic for window in draft.windows) else fine)(draft)
    return drafts


def _rank(found: Predicted) -> tuple[float, float]:
    return found.t_plan, found.exposed_us


def _enough(trace: Trace, budget: float) -> None:
    for stage in trace.stages:
        needed = trace.memory.peak(stage)
        if needed > budget:
            problem = f"stage {stage} needs {needed / 1e9:.2f} GB without any verification, and the budget is "
            fix = f"give a --memory-budget of {needed / 1e9:.2f}GB or more, or split the model further"
            raise UserError(f"{problem}{budget / 1e9:.2f} GB", fix)
