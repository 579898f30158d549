"""Make several DMR plans of one iteration, because no single order of choices is the best for every iteration.

DMR (dual modular redundancy, SpareTrain) verifies an operator by executing it a second time. A *window* is a time in
which a pipeline stage communicates or is idle, so that second executions in it cost nothing. Planning has three phases:

1. Compare operators with the recomputation of activation checkpointing, which takes place anyway.
2. Move *AGC segments* (sequences of operators that are executed again as a whole) to windows.
3. Move single operators to the remaining time of windows.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ft.systems.dmr.plan.agc import InnerActivations, coarse
from ft.systems.dmr.plan.assign import AgcSegment, Assignment
from ft.systems.dmr.plan.draft import Draft
from ft.systems.dmr.plan.fine import fine
from ft.systems.dmr.plan.online import serve
from ft.systems.dmr.plan.piggyback import piggyback
from ft.systems.dmr.plan.trace import Trace

PHASES = 3
"""Number of planning phases."""

SMALL = 100
"""Number of operators per stage up to which the exact solver is tried."""


@dataclass(frozen=True)
class Part:
    """The part of a plan that belongs to one stage (or to all stages).

    Attributes:
        assign: operator id -> how the operator is verified.
        segments: AGC segments, by id.
        peak: peak memory, in bytes.
    """

    assign: Mapping[str, Assignment]
    segments: Mapping[str, AgcSegment]
    peak: float


def attempts(trace: Trace, budget: float, phases: int, kinds: Sequence[str]) -> Iterator[tuple[int, list[Part]]]:
    """Yield several plans, each as (number of planning phases that it uses, a part for each stage).

    One plan keeps the activations inside AGC segments that come from a recomputation. Another plan regenerates them,
    which is better where memory and not time is scarce. A third plan leaves out phase 2, because single operators may
    fill windows better. A small iteration is also planned by the exact solver.

    Args:
        trace: the iteration.
        budget: memory that each stage may use, in bytes.
        phases: highest number of planning phases, 1 to 3.
        kinds: kinds of windows that may be used.
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
    if phases == PHASES and not trace.dynamic and len(trace.ops) <= SMALL * len(trace.stages):
        yield from _exactly(_begun(trace, budget, kinds))


def _begun(trace: Trace, budget: float, kinds: Sequence[str]) -> list[Draft]:
    drafts = [Draft(trace, stage, budget, kinds) for stage in trace.stages]
    for draft in drafts:
        piggyback(draft)
    return drafts


def _exactly(drafts: list[Draft]) -> Iterator[tuple[int, list[Part]]]:
    """Yield the plan that puts the most verification time into windows, if every stage is small enough for the exact
    solver."""
    # Imported here because SciPy's solvers take longer to import than it takes to plan without them.
    from ft.systems.dmr.plan.exact import exact

    if all(exact(draft) for draft in drafts):
        yield PHASES, _parts(drafts)


def _parts(drafts: list[Draft]) -> list[Part]:
    return [Part(draft.completed(), dict(draft.segments), draft.holdings.peak) for draft in drafts]
