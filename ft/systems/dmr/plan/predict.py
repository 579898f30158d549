"""What an iteration takes with a plan: the schedule played through once more, with the verifications in it.

A check in a window between units is work behind the unit before it: it delays the next unit by what does not fit, and
by nothing where it fits. So windows that shrink or grow as naive checks lengthen the units are accounted for.
"""

import bisect
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ft.systems.dmr.plan.assign import NAIVE, PIGGYBACK, UNCHECKED, AgcSegment, Assignment
from ft.systems.dmr.plan.piggyback import executes_last_again
from ft.systems.dmr.plan.schedule import Unit, simulate
from ft.systems.dmr.plan.trace import BACKWARD, CLOSE_US, IN_UNITS, INTRA, RECOMPUTE, Operator, Trace, Window


def exposed_us(trace: Trace, op: Operator, assignment: Assignment) -> float:
    """Time by which an operator's verification lengthens its stage's work."""
    return _cost(trace, op).of(assignment.set)


def everything_at_once(trace: Trace) -> dict[str, Assignment]:
    """Naive DMR: every operator, recomputed ones too, is executed again at once."""
    return {op.id: Assignment(NAIVE if op.checking.deterministic else UNCHECKED) for op in trace.ops}


@dataclass(frozen=True)
class Added:
    """What DMR adds on one stage, in microseconds: to units (None: after the pipeline), and behind units."""

    inside: dict[Unit | None, float] = field(default_factory=dict)
    behind: dict[Unit, float] = field(default_factory=dict)


class Clock:
    """The iteration's time for any assignment.

    Args:
        trace: with a pipeline, whose stages wait for each other; without, each stage stands alone.
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
        """Without DMR."""
        return self._time({})

    def time_us(self, assign: Mapping[str, Assignment], segments: Mapping[str, AgcSegment] | None = None) -> float:
        """With every operator verified as assigned."""
        return self._time(self._added(assign, segments or {}))

    def exposed_us(self, assign: Mapping[str, Assignment]) -> float:
        """Verification that is not hidden, summed over stages."""
        return sum(self._costs[each].of(how.set) for each, how in assign.items())

    def _time(self, added: Mapping[int, Added]) -> float:
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

    def _added(self, assign: Mapping[str, Assignment], segments: Mapping[str, AgcSegment]) -> dict[int, Added]:
        """Stage -> what is added there."""
        added = {stage: Added() for stage in self._trace.stages}
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
        """Window -> the unit behind which its verifications are executed. Windows inside units, and those after the
        whole pipeline, hide what fits them: they are left out, for it costs nothing."""
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
    """What an operator's verification lengthens its stage's work by, in microseconds.

    Args:
        unit: which one it lengthens, verified at once; again: the same, in set P. None: it comes after the pipeline.
    """

    stage: int
    unit: Unit | None
    again: Unit | None
    naive_us: float
    piggyback_us: float

    def of(self, name: str) -> float:
        """In one of SETS."""
        return self.naive_us if name == NAIVE else self.piggyback_us if name == PIGGYBACK else 0.0


def _cost(trace: Trace, op: Operator) -> _Cost:
    again = op.t_us if executes_last_again(trace.early_stop, op) else 0.0
    unit = unit_of(op) if op.place.phase in IN_UNITS else None
    later = unit._replace(backward=True) if unit is not None and again else unit
    return _Cost(op.place.stage, unit, later, op.check_us, op.checking.compare_us + again)


def unit_of(op: Operator) -> Unit:
    """The schedule's unit in which an operator runs; recomputation belongs to the backward."""
    place = op.place
    return Unit(place.stage, place.microbatch, place.chunk, place.phase in (RECOMPUTE, BACKWARD))


def _unit_spans(trace: Trace) -> dict[Unit, tuple[float, float]]:
    """Unit -> (start, end): from its first operator to its last, with the windows inside units before and after."""
    spans: dict[Unit, tuple[float, float]] = {}
    for op in trace.ops:
        if op.place.phase in IN_UNITS:
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
    """Stage -> (start, unit) of its units in order of time."""
    order: dict[int, list[tuple[float, Unit]]] = defaultdict(list)
    for begin, unit in sorted((begin, unit) for unit, (begin, _) in spans.items()):
        order[unit.stage].append((begin, unit))
    return order


def _widen(spans: dict[Unit, tuple[float, float]], order: list[tuple[float, Unit]], windows: Iterable[Window]) -> None:
    """Adds one stage's windows inside units, in order of time, to the spans of their units."""
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
    """Which of the windows between two units is the later one's first; their number: none is.

    A unit without recomputation begins with a transfer, and may wait for its message before that: the widest hole
    between operators and windows is where the earlier unit ends. Without holes all are the earlier one's.
    """
    if behind is None:
        return len(windows) if before is not None else 0
    if before is None:
        return 0
    ends = [before[1], *(window.end_us for window in windows)]
    starts = [*(window.start_us for window in windows), behind[0]]
    holes = [start - end if start - end > CLOSE_US else 0.0 for end, start in zip(ends, starts, strict=True)]
    return max(range(len(holes)), key=lambda place: (holes[place], place))
