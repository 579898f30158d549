"""Plan each stage in several ways, because no single order of choices is the best for every trace."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ft.systems.dmr.plan.agc import Inner, coarse
from ft.systems.dmr.plan.assign import AgcSegment, Assignment
from ft.systems.dmr.plan.draft import Draft
from ft.systems.dmr.plan.fine import fine
from ft.systems.dmr.plan.online import serve
from ft.systems.dmr.plan.piggyback import piggyback
from ft.systems.dmr.plan.trace import Trace

PHASES = 3

SMALL = 100
"""Number of operators per stage up to which the exact solver is tried."""


@dataclass(frozen=True)
class Part:
    """The part of a plan that belongs to one stage (or to all stages): assignments of operators, AGC segments, peak
    memory in bytes."""

    assign: Mapping[str, Assignment]
    segments: Mapping[str, AgcSegment]
    peak: float


def attempts(trace: Trace, budget: float, phases: int, kinds: Sequence[str]) -> Iterator[tuple[int, list[Part]]]:
    """Yield (number of phases, a part for each stage) of several plans for each number of phases from 1 to ``phases``.

    One plan keeps the inner activations of AGC segments. Another one regenerates them, which is better where memory and
    not time is scarce. A third one leaves out phase 2, because single operators may fill windows better.
    """
    for number, inner in ((1, None), (2, Inner.KEPT), (2, Inner.REGENERATED)):
        if number > phases:
            return
        drafts = _begun(trace, budget, kinds)
        if inner is not None:
            for draft in drafts:
                coarse(draft, inner)
        yield number, _parts(drafts)
        if phases == PHASES:
            for draft in drafts:
                # Windows of unknown length can only be used by the planner at run time, which then has all windows to
                # itself.
                (serve if any(window.dynamic for window in draft.windows) else fine)(draft)
            yield PHASES, _parts(drafts)
    if phases == PHASES and not trace.dynamic and len(trace.ops) <= SMALL * len(trace.stages):
        yield from _exactly(_begun(trace, budget, kinds))


def _begun(trace: Trace, budget: float, kinds: Sequence[str]) -> list[Draft]:
    drafts = [Draft(trace, stage, budget, kinds) for stage in trace.stages]
    for draft in drafts:
        piggyback(draft)
    return drafts


def _exactly(drafts: list[Draft]) -> Iterator[tuple[int, list[Part]]]:
    """Yield the plan that hides the most, if every stage is small enough for the exact solver."""
    # Imported here because SciPy's solvers take longer to import than it takes to plan without them.
    from ft.systems.dmr.plan.exact import exact

    if all(exact(draft) for draft in drafts):
        yield PHASES, _parts(drafts)


def _parts(drafts: list[Draft]) -> list[Part]:
    return [Part(draft.completed(), dict(draft.segments), draft.holdings.peak) for draft in drafts]
