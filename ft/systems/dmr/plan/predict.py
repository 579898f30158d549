"""Predict the duration of an iteration with a DMR plan: simulate the pipeline schedule with the verifications in it.

The schedules are 1F1B and interleaved 1F1B as megatron-core runs them. Every stage executes its own fixed order of
units, and before a unit it waits for the message of a neighbour that the unit needs. The time between units is idle.
Without communication time, every stage of 1F1B is idle for exactly (P - 1)(f + b), where P is the number of stages
and f and b are the times of a forward and a backward pass.

A verification in a window between units is simulated as work after the unit that precedes the window: it delays the
next unit by the part that does not fit into the window. The simulation therefore accounts for windows that shrink or
grow when immediate verifications lengthen the units.
"""

import bisect
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from ft.systems.dmr.plan.phases import executes_last_again
from ft.systems.dmr.plan.trace import (
    BACKWARD,
    IN_UNITS,
    INTRA,
    NAIVE,
    PIGGYBACK,
    RECOMPUTE,
    UNCHECKED,
    AgcSegment,
    Assignment,
    Operator,
    Trace,
)
from ft.systems.schedule.check import play
from ft.systems.schedule.kinds import Pipeline, orders
from ft.systems.schedule.program import Unit


@dataclass(frozen=True)
class Timeline:
    """The result of a simulation.

    Attributes:
        order: units of each stage in the order of their execution.
        times: unit -> (start, end) in microseconds.
        free_us: unit -> time at which its stage could continue after the unit, including the work added after it.
    """

    pipeline: Pipeline
    order: tuple[tuple[Unit, ...], ...]
    times: Mapping[Unit, tuple[float, float]]
    free_us: Mapping[Unit, float]

    @property
    def end_us(self) -> float:
        """Return when the last stage has finished its units: the duration of the iteration, without data-parallel
        reductions and the optimizer step."""
        return max(max(self.times[order[-1]][1], self.free_us[order[-1]]) for order in self.order)


def simulate(
    pipeline: Pipeline, duration: Callable[[Unit], float], behind: Callable[[Unit], float] | None = None
) -> Timeline:
    """Simulate the schedule.

    Args:
        duration: returns the time of a unit in microseconds, without communication. A backward pass includes the
            gradients of inputs and of weights, because core's schedules send the input's gradient after both.
        behind: returns the time in microseconds that a stage spends on deferred verifications after a unit and before
            its next unit, while the message of the unit is already in flight. None: no such work.
    """
    order = orders(pipeline)
    played = play(
        order,
        pipeline.routes.needs,
        duration,
        comm_us=pipeline.comm_us,
        waits_until_sent=partial(_sends, pipeline) if pipeline.blocking else None,
        behind=behind,
    )
    return Timeline(pipeline, order, played.times, played.free)


def _sends(pipeline: Pipeline, unit: Unit) -> bool:
    target = pipeline.routes.receiver(unit)
    return target is not None and target.stage != unit.stage


class Idle(NamedTuple):
    """Time in which a stage runs no unit: of kind "p2p" while a message of the stage is in flight, else "bubble".
    ``after``: the unit before it; None at the beginning of the iteration, where there is nothing yet to verify."""

    stage: int
    start_us: float
    end_us: float
    kind: str
    after: Unit | None


def idle(timeline: Timeline) -> list[Idle]:
    """Return all idle times, ordered by stage and time. If no work was added after units, the idle times of a stage add
    up to the end of the timeline minus the sum of its units' durations.

    An idle time is of kind p2p while a message is in flight that the stage waits to receive or to have sent. The rest
    is of kind bubble, as is the time from a stage's last unit until the slowest stage has finished.
    """
    found: list[Idle] = []
    for stage, units in enumerate(timeline.order):
        previous = None
        for unit in (*units, None):
            start = timeline.times[previous][1] if previous else 0.0
            end = timeline.times[unit][0] if unit else timeline.end_us
            if end > start:
                found += _gap(timeline, stage, (start, end), previous, unit)
            previous = unit
    return found


def _gap(timeline: Timeline, stage: int, gap: tuple[float, float], previous: Unit | None, unit: Unit | None) -> list:
    """Return the gap between two units as up to three idle times: the stage's own message is in flight (p2p), no
    message is in flight (bubble), the awaited message is in flight (p2p)."""
    pipeline, (start, end) = timeline.pipeline, gap
    comm = pipeline.comm_us
    sent = start
    if previous is not None and pipeline.blocking and _sends(pipeline, previous):
        sent = min(end, start + comm)
    source = None if unit is None else pipeline.routes.needs(unit)
    waits = source is not None and source.stage != stage and comm > 0
    awaited = max(sent, timeline.times[source][1]) if waits else end
    parts = ((start, sent, "p2p"), (sent, awaited, "bubble"), (awaited, end, "p2p"))
    return [Idle(stage, a, b, kind, previous) for a, b, kind in parts if b > a]


def exposed_us(trace: Trace, op: Operator, assignment: Assignment) -> float:
    """Return the time by which the verification of an operator lengthens the work of its stage, in microseconds."""
    return _cost(trace, op).of(assignment.set)


def everything_at_once(trace: Trace) -> dict[str, Assignment]:
    """Return the assignment of naive DMR: every operator, recomputed ones too, is executed again immediately."""
    return {op.id: Assignment(NAIVE if op.deterministic else UNCHECKED) for op in trace.ops}


class Clock:
    """Predicts the duration of an iteration for any assignment of operators to ways of verification. With a pipeline
    schedule, stages wait for each other; otherwise they are independent."""

    def __init__(self, trace: Trace):
        self._trace = trace
        self._costs = {op.id: _cost(trace, op) for op in trace.ops}
        self._spans = {unit: (start, end) for unit, start, end in trace.units}
        self._pipeline_end = max((end for _, end in self._spans.values()), default=0.0)
        self._behind = self._units_before_windows()
        ends = [op.end_us for op in trace.ops] + [window.end_us for window in trace.windows]
        self._end = max(ends, default=0.0)

    def none_us(self) -> float:
        """Return the duration without DMR, in microseconds."""
        return self._time({}, {})

    def time_us(self, assign: Mapping[str, Assignment], segments: Mapping[str, AgcSegment] | None = None) -> float:
        """Return the duration with every operator verified as assigned, in microseconds."""
        return self._time(*self._added(assign, segments or {}))

    def exposed_us(self, assign: Mapping[str, Assignment]) -> float:
        """Return the verification time outside of windows, summed over stages, in microseconds."""
        return sum(self._costs[each].of(how.set) for each, how in assign.items())

    def _time(self, inside: Mapping[Unit | int, float], behind: Mapping[Unit, float]) -> float:
        """Return the duration of the iteration with the added times of ``_added``."""
        pipeline = self._trace.pipeline
        if pipeline is None:
            totals: dict[int, float] = defaultdict(float)
            for where, us in inside.items():
                totals[where if isinstance(where, int) else where.stage] += us
            return self._end + max(totals.values(), default=0.0)

        def duration(unit: Unit) -> float:
            begin, end = self._spans.get(unit, (0.0, 0.0))
            return end - begin + inside.get(unit, 0.0)

        after = max((us for where, us in inside.items() if isinstance(where, int)), default=0.0)
        tail = max(0.0, self._end - self._pipeline_end) + after
        return simulate(pipeline, duration, lambda unit: behind.get(unit, 0.0)).end_us + tail

    def _added(
        self, assign: Mapping[str, Assignment], segments: Mapping[str, AgcSegment]
    ) -> tuple[dict[Unit | int, float], dict[Unit, float]]:
        """Return the microseconds that DMR adds inside each unit (or of a stage outside of all units), and behind each
        unit."""
        inside: dict[Unit | int, float] = defaultdict(float)
        behind: dict[Unit, float] = defaultdict(float)
        loads = [(segment.window, segment.load_us) for segment in segments.values()]
        for op, cost in self._costs.items():
            how = assign[op]
            paid = cost.of(how.set)
            if paid:
                inside[cost.again if how.set == PIGGYBACK else cost.unit] += paid
            elif how.window is not None and how.agc_segment is None:
                loads.append((how.window, cost.naive_us))
        for window, load_us in loads:
            unit = self._behind.get(window)
            if unit is not None:
                behind[unit] += load_us
        return inside, behind

    def _units_before_windows(self) -> dict[str, Unit]:
        """Return window id -> the unit after which the verifications in the window are executed. Windows inside units
        and after the last unit are left out, because verifications that fit into them cost nothing."""
        order: dict[int, list[tuple[float, Unit]]] = defaultdict(list)
        for begin, unit in sorted((begin, unit) for unit, (begin, _) in self._spans.items()):
            order[unit.stage].append((begin, unit))
        found = {}
        for window in self._trace.windows:
            units = order[window.stage]
            place = bisect.bisect_right(units, window.start_us, key=lambda entry: entry[0])
            if place and window.kind not in INTRA and window.start_us < self._pipeline_end:
                found[window.id] = units[place - 1][1]
        return found


class _Cost(NamedTuple):
    """Microseconds by which the verification of an operator lengthens the work of its stage: immediately, or in set P.
    ``unit`` and ``again`` are what is lengthened then; the number of the stage if the operator is in no unit."""

    unit: Unit | int
    again: Unit | int
    naive_us: float
    piggyback_us: float

    def of(self, name: str) -> float:
        """Return the cost in one of SETS."""
        return self.naive_us if name == NAIVE else self.piggyback_us if name == PIGGYBACK else 0.0


def _cost(trace: Trace, op: Operator) -> _Cost:
    again = op.t_us if executes_last_again(trace.early_stop, op) else 0.0
    if op.phase not in IN_UNITS:
        return _Cost(op.stage, op.stage, op.check_us, op.compare_us + again)
    unit = unit_of(op)
    return _Cost(unit, unit._replace(backward=True) if again else unit, op.check_us, op.compare_us + again)


def unit_of(op: Operator) -> Unit:
    """Return the unit of the schedule in which an operator runs; recomputation belongs to the backward."""
    return Unit(op.stage, op.microbatch, op.chunk, op.phase in (RECOMPUTE, BACKWARD))
