"""The DMR plan of one pipeline stage while it is made: assignments, time left in windows, and memory that is kept.

DMR (dual modular redundancy, SpareTrain) verifies an operator by executing it a second time. The planner defers this to
a *window*, a time in which the stage communicates or is idle; until then the operator's tensors are kept in memory. An
*AGC segment* is a sequence of operators that is deferred and executed again as a whole.
"""

import bisect
from collections.abc import Iterable

from ft.systems.dmr.plan.assign import NAIVE, UNCHECKED, AgcSegment, Assignment, deferred_set
from ft.systems.dmr.plan.holdings import Holdings
from ft.systems.dmr.plan.trace import CLOSE_US, OPTIMIZER, Operator, Trace, rooms

ROUNDING_US = 1e-6
"""Tolerance by which the load of a window may exceed its time, in microseconds."""


class Draft:
    """The operators and windows of one stage, and the decisions that the phases of the planner have taken so far.

    Methods identify a window by its ``slot``, its position in ``windows``.

    Args:
        trace: the iteration that is planned.
        stage: the pipeline stage.
        budget: bytes that the stage may use.
        kinds: kinds of windows that may be used.

    Attributes:
        ops: operators of the stage, in order of their start.
        windows: windows that may be used, in order of their end.
        room: time left in each window, in microseconds.
        holdings: memory that deferred verifications keep.
        assign: operator id -> how the operator is verified, as far as decided.
        otherwise: operator id -> how the operator is verified if no window is found for it.
        segments: AGC segments, by id.
    """

    def __init__(self, trace: Trace, stage: int, budget: float, kinds: Iterable[str]):
        self.trace, self.stage = trace, stage
        self.ops = [op for op in trace.ops if op.place.stage == stage]
        usable = [each for each in trace.windows if each.stage == stage and each.kind in set(kinds) and each.dur_us > 0]
        self.windows = sorted(usable, key=lambda window: window.end_us)
        room = rooms(self.windows)
        self.room = [room[window.id] for window in self.windows]
        self.holdings = Holdings(trace, stage, self.windows, budget)
        self.assign: dict[str, Assignment] = {}
        self.otherwise: dict[str, Assignment] = {}
        self.segments: dict[str, AgcSegment] = {}
        self._changes = _changes(self.ops)
        self._deferrable = {op.id for op in self.ops if self._is_worth_deferring(op)}
        self._drained = min((op.start_us for op in self.ops if op.place.phase == OPTIMIZER), default=float("inf"))

    def at_once(self, op: Operator) -> bool:
        """Return whether the operator has to be verified when it is executed, because it changes its inputs or belongs
        to the optimizer."""
        return bool(op.checking.mutates) or op.place.phase == OPTIMIZER

    def _is_worth_deferring(self, op: Operator) -> bool:
        verifiable = op.checking.deterministic and not self.at_once(op)
        return verifiable and (op.check_us > op.checking.defer_us or not op.checking.defer_us)

    def open(self, op: Operator) -> bool:
        """Return whether the operator may be deferred and is not assigned yet."""
        return op.id in self._deferrable and op.id not in self.assign

    def deadline(self, op: Operator) -> float:
        """Return the time until which the operator must be verified, in microseconds: the next change of one of its
        tensors in place, or the beginning of the optimizer step."""
        latest = self._drained
        for name in op.tensors:
            times = self._changes.get(name)
            if times is not None:
                next_change = bisect.bisect_left(times, op.end_us - CLOSE_US)
                if next_change < len(times):
                    latest = min(latest, times[next_change])
        return latest

    def reaches(self, op: Operator, slot: int) -> bool:
        """Return whether window ``slot`` lies between the operator's execution and its deadline."""
        return self.within(slot, op.end_us, self.deadline(op))

    def within(self, slot: int, executed_us: float, deadline_us: float) -> bool:
        """Return whether window ``slot`` begins after ``executed_us`` and ends before ``deadline_us``."""
        window = self.windows[slot]
        return executed_us <= window.start_us + CLOSE_US and window.end_us <= deadline_us + CLOSE_US

    def has_time(self, slot: int, load_us: float) -> bool:
        """Return whether window ``slot`` has ``load_us`` microseconds left."""
        return self.room[slot] >= load_us - ROUNDING_US

    def defer(self, op: Operator, slot: int) -> bool:
        """Defer the operator to window ``slot`` if time and memory allow; return whether they do."""
        if not self.has_time(slot, op.check_us) or not self.holdings.fits(op.tensors, slot):
            return False
        self._take(slot, op.check_us, op.tensors)
        window = self.windows[slot]
        self.assign[op.id] = Assignment(deferred_set(window), window.id)
        return True

    def defer_segment(self, segment: AgcSegment, slot: int) -> None:
        """Defer an AGC segment to window ``slot``, into which it fits."""
        self._take(slot, segment.load_us, segment.keeps)
        self.segments[segment.id] = segment
        name = deferred_set(self.windows[slot])
        for each in segment.ops:
            self.assign[each] = Assignment(name, segment.window, segment.id)

    def give_up(self, op_id: str) -> None:
        """Decide that the operator gets no window: assign its alternative in ``otherwise``, or else naive (verified
        immediately)."""
        self.assign[op_id] = self.otherwise.get(op_id, Assignment(NAIVE))

    def _take(self, slot: int, load_us: float, tensors: Iterable[str]) -> None:
        self.room[slot] -= load_us
        self.holdings.keep(tensors, slot)

    def completed(self) -> dict[str, Assignment]:
        """Return the assignment of all operators. Operators that are not assigned yet get their alternative in
        ``otherwise``, or else naive; operators that are not reproducible are unchecked."""
        naive, in_vain = Assignment(NAIVE), Assignment(UNCHECKED)
        found = {}
        for op in self.ops:
            meant = self.otherwise.get(op.id, naive) if op.checking.deterministic else in_vain
            found[op.id] = self.assign.get(op.id, meant)
        return found


def _changes(ops: Iterable[Operator]) -> dict[str, list[float]]:
    """Return tensor -> start times of the operators that change it in place, in order."""
    found: dict[str, list[float]] = {}
    for op in sorted(ops, key=lambda op: op.start_us):
        for name in op.checking.mutates:
            found.setdefault(name, []).append(op.start_us)
    return found
