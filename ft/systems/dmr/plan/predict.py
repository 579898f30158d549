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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from ft.systems.dmr.plan.phases import executes_last_again
from ft.systems.dmr.plan.trace import (
    BACKWARD,
    CLOSE_US,
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
    Window,
)
from ft.systems.schedule.check import play
from ft.systems.schedule.kinds import Pipeline, orders
from ft.systems.schedule.program import Unit


@dataclass(frozen=True)
class Timeline:
    """The result of a simulation.

    Attributes:
        pipeline: the simulated pipeline.
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
        pipeline: number of stages, microbatches and chunks, and communication time.
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
    """Time in which a stage runs no unit.

    Attributes:
        stage: the stage.
        start_us: start of the idle time.
        end_us: end of the idle time.
        kind: "p2p" while a message of the stage is in flight, else "bubble".
        after: the unit before it; None at the beginning of the iteration, where there is nothing yet to verify.
    """

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
    """Return the time by which the verification of an operator lengthens the work of its stage, in microseconds.

    Args:
        trace: the profile.
        op: the operator.
        assignment: when the operator is verified.
    """
    return _cost(trace, op).of(assignment.set)


def everything_at_once(trace: Trace) -> dict[str, Assignment]:
    """Return the assignment of naive DMR: every operator, recomputed ones too, is executed again immediately."""
    return {op.id: Assignment(NAIVE if op.deterministic else UNCHECKED) for op in trace.ops}


@dataclass(frozen=True)
class AddedTime:
    """Time that DMR adds on one stage, in microseconds.

    Attributes:
        inside: unit -> added time inside the unit; key None: added time outside of all units, which is counted
            after the last unit.
        behind: unit -> added time between this unit and the next one.
    """

    inside: dict[Unit | None, float] = field(default_factory=dict)
    behind: dict[Unit, float] = field(default_factory=dict)


class Clock:
    """Predicts the duration of an iteration for any assignment of operators to ways of verification.

    Args:
        trace: one iteration. If it has a pipeline schedule, stages wait for each other; otherwise they are independent.
    """

    def __init__(self, trace: Trace):
        self._trace = trace
        self._costs = {op.id: _cost(trace, op) for op in trace.ops}
        self._spans = _unit_spans(trace)
        self._pipeline_end = max((end for _, end in self._spans.values()), default=0.0)
        self._behind = self._units_before_windows()
        ends = [op.end_us for op in trace.ops] + [window.end_us for window in trace.windows]
        self._end = max(ends, default=0.0)

    def none_us(self) -> float:
        """Return the duration without DMR, in microseconds."""
        return self._time({})

    def time_us(self, assign: Mapping[str, Assignment], segments: Mapping[str, AgcSegment] | None = None) -> float:
        """Return the duration with every operator verified as assigned, in microseconds."""
        return self._time(self._added(assign, segments or {}))

    def exposed_us(self, assign: Mapping[str, Assignment]) -> float:
        """Return the verification time outside of windows, summed over stages, in microseconds."""
        return sum(self._costs[each].of(how.set) for each, how in assign.items())

    def _time(self, added: Mapping[int, AddedTime]) -> float:
        pipeline = self._trace.pipeline
        if pipeline is None:
            return self._end + max((sum(each.inside.values()) for each in added.values()), default=0.0)

        def duration(unit: Unit) -> float:
            begin, end = self._spans.get(unit, (0.0, 0.0))
            return end - begin + (added[unit.stage].inside.get(unit, 0.0) if unit.stage in added else 0.0)

        def behind(unit: Unit) -> float:
            return added[unit.stage].behind.get(unit, 0.0) if unit.stage in added else 0.0

        tail = max(0.0, self._end - self._pipeline_end) + max(
            (each.inside.get(None, 0.0) for each in added.values()), default=0.0
        )
        return simulate(pipeline, duration, behind).end_us + tail

    def _added(self, assign: Mapping[str, Assignment], segments: Mapping[str, AgcSegment]) -> dict[int, AddedTime]:
        """Return stage -> the time that DMR adds there."""
        added = {stage: AddedTime() for stage in self._trace.stages}
        loads = [(segment.window, segment.load_us) for segment in segments.values()]
        for op, cost in self._costs.items():
            how = assign[op]
            paid = cost.of(how.set)
            if paid:
                inside = added[cost.stage].inside
                unit = cost.again if how.set == PIGGYBACK else cost.unit
                inside[unit] = inside.get(unit, 0.0) + paid
            elif how.window is not None and how.agc_segment is None:
                loads.append((how.window, cost.naive_us))
        for window, load_us in loads:
            unit = self._behind.get(window)
            if unit is not None:
                behind = added[unit.stage].behind
                behind[unit] = behind.get(unit, 0.0) + load_us
        return added

    def _units_before_windows(self) -> dict[str, Unit]:
        """Return window id -> the unit after which the verifications in the window are executed. Windows inside units
        and after the last unit are left out, because verifications that fit into them cost nothing."""
        order = _in_order(self._spans)
        found = {}
        for window in self._trace.windows:
            units = order[window.stage]
            place = bisect.bisect_right(units, window.start_us, key=lambda entry: entry[0])
            if place and window.kind not in INTRA and window.start_us < self._pipeline_end:
                found[window.id] = units[place - 1][1]
        return found


@dataclass(frozen=True)
class _Cost:
    """Time by which the verification of an operator lengthens the work of its stage, in microseconds.

    Args:
        stage: stage of the operator.
        unit: the unit that is lengthened by an immediate verification; None if the operator is in no unit.
        again: the unit that is lengthened by a verification in set P; None if the operator is in no unit.
        naive_us: cost of an immediate verification.
        piggyback_us: cost of a verification in set P.
    """

    stage: int
    unit: Unit | None
    again: Unit | None
    naive_us: float
    piggyback_us: float

    def of(self, name: str) -> float:
        """Return the cost in one of SETS."""
        return self.naive_us if name == NAIVE else self.piggyback_us if name == PIGGYBACK else 0.0


def _cost(trace: Trace, op: Operator) -> _Cost:
    again = op.t_us if executes_last_again(trace.early_stop, op) else 0.0
    unit = unit_of(op) if op.phase in IN_UNITS else None
    later = unit._replace(backward=True) if unit is not None and again else unit
    return _Cost(op.stage, unit, later, op.check_us, op.compare_us + again)


def unit_of(op: Operator) -> Unit:
    """Return the unit of the schedule in which an operator runs; recomputation belongs to the backward."""
    return Unit(op.stage, op.microbatch, op.chunk, op.phase in (RECOMPUTE, BACKWARD))


def _unit_spans(trace: Trace) -> dict[Unit, tuple[float, float]]:
    """Return unit -> (start, end) in microseconds, from its first operator to its last, including the windows of kinds
    INTRA at its ends that belong to it."""
    spans: dict[Unit, tuple[float, float]] = {}
    for op in trace.ops:
        if op.phase in IN_UNITS:
            unit = unit_of(op)
            begin, end = spans.get(unit, (op.start_us, op.end_us))
            spans[unit] = (min(begin, op.start_us), max(end, op.end_us))
    inside: dict[int, list[Window]] = defaultdict(list)
    for window in sorted(trace.windows, key=lambda window: window.start_us):
        if window.kind in INTRA:
            inside[window.stage].append(window)
    order = _in_order(spans)
    for stage, windows in inside.items():
        if order[stage]:
            _widen(spans, order[stage], windows)
    return spans


def _in_order(spans: Mapping[Unit, tuple[float, float]]) -> dict[int, list[tuple[float, Unit]]]:
    """Return stage -> [(start in microseconds, unit), ...] in order of time."""
    order: dict[int, list[tuple[float, Unit]]] = defaultdict(list)
    for begin, unit in sorted((begin, unit) for unit, (begin, _) in spans.items()):
        order[unit.stage].append((begin, unit))
    return order


def _widen(spans: dict[Unit, tuple[float, float]], order: list[tuple[float, Unit]], windows: Iterable[Window]) -> None:
    """Extend the spans of one stage's units by its windows of kinds INTRA, which are given in order of time."""
    between: dict[int, list[Window]] = defaultdict(list)
    for window in windows:
        place = bisect.bisect_right(order, window.start_us, key=lambda entry: entry[0])
        begin, end = spans[order[place - 1][1]] if place else (0.0, 0.0)
        if window.start_us < end - CLOSE_US:
            spans[order[place - 1][1]] = (begin, max(end, window.end_us))
        else:
            between[place].append(window)
    for place, found in between.items():
        before = order[place - 1][1] if place else None
        behind = order[place][1] if place < len(order) else None
        first = _first_of_next(spans.get(before), found, spans.get(behind))
        if first > 0:
            spans[before] = (spans[before][0], max(spans[before][1], *(window.end_us for window in found[:first])))
        if first < len(found):
            spans[behind] = (found[first].start_us, spans[behind][1])


def _first_of_next(
    before: tuple[float, float] | None, windows: Sequence[Window], behind: tuple[float, float] | None
) -> int:
    """Return the index of the first window, of those between two units, that belongs to the later unit; the number of
    windows if all of them belong to the earlier unit.

    A unit may begin with communication (without recomputation it does), and waits for its message before that. The
    widest gap between operators and windows is therefore taken to be the wait, and ends the earlier unit. Without gaps
    all windows belong to the earlier unit.

    Args:
        before: (start, end) of the earlier unit; None if there is none.
        windows: the windows between the units, in order of time.
        behind: (start, end) of the later unit; None if there is none.
    """
    if behind is None:
        return len(windows) if before is not None else 0
    if before is None:
        return 0
    ends = [before[1], *(window.end_us for window in windows)]
    starts = [*(window.start_us for window in windows), behind[0]]
    holes = [start - end if start - end > CLOSE_US else 0.0 for end, start in zip(ends, starts, strict=True)]
    return max(range(len(holes)), key=lambda place: (holes[place], place))
