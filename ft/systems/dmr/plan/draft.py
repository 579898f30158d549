"""The DMR plan of one pipeline stage while it is made: assignments, time left in windows, and memory that is kept.

Until a deferred verification has run, the tensors of its operators are kept, which training would have freed. They are
counted against the memory budget over time.
"""

import bisect
import math
from collections.abc import Iterable, Sequence

import numpy as np

from ft.systems.dmr.plan.trace import (
    CLOSE_US,
    NAIVE,
    UNCHECKED,
    AgcSegment,
    Assignment,
    Changes,
    Operator,
    Tensor,
    Trace,
    Window,
    deferred_set,
    rooms,
)


class Holdings:
    """The memory of one stage, by slots of time: slot k lies between the end of window k - 1 and the end of window k.

    A tensor that is kept for a verification in window k exists until that window ends. It costs memory from the time
    when training would have freed it. A tensor that several verifications need is counted once. Within a slot, the
    maximum that training uses is added to the maximum that is kept, so that the result is never too low.

    Args:
        windows: windows of the stage, in order of their end.
        budget: bytes that the stage may use.

    Attributes:
        base: the maximum that training uses in each slot, bytes [slots].
    """

    def __init__(self, trace: Trace, stage: int, windows: Sequence[Window], budget: float):
        self._tensors = trace.tensors
        self._ends = np.array([window.end_us for window in windows])
        self._end_list: list[float] = self._ends.tolist()
        self._first: dict[str, int] = {}
        self._kept = np.zeros(len(windows))
        self.base = _in_use(trace.memory.timeline.get(stage, ()), self._ends)
        self._headroom = budget - self.base
        self._until: dict[str, int] = {}
        self._outside = trace.memory.peak(stage)

    def fits(self, tensors: Iterable[str], slot: int) -> bool:
        """Return whether keeping these tensors until the end of window ``slot`` stays within the budget."""
        spans = self._spans(tensors, slot)
        if not spans:
            return True
        # All of the tensors are kept in the last slot: checking it first rejects most of what does not fit.
        level = self._kept[slot]
        for _, size, _ in spans:
            level += size
        if level > self._headroom[slot]:
            return False
        first = min(begin for begin, _, _ in spans)
        if first == slot:
            return True
        kept = self._kept[first : slot + 1].copy()
        for begin, size, _ in spans:
            kept[begin - first :] += size
        return bool((kept <= self._headroom[first : slot + 1]).all())

    def keep(self, tensors: Iterable[str], slot: int) -> None:
        """Keep these tensors until the end of window ``slot``."""
        for begin, size, name in self._spans(tensors, slot):
            self._kept[begin : slot + 1] += size
            self._until[name] = slot

    def _spans(self, tensors: Iterable[str], slot: int) -> list[tuple[int, float, str]]:
        """Return (first slot, bytes, tensor) for each tensor that has to be kept in more slots than so far in order to
        exist until the end of slot ``slot``."""
        spans = []
        for name in dict.fromkeys(tensors):
            tensor: Tensor = self._tensors[name]
            # The additional slots of a tensor that is already kept begin after its last slot; those of any other tensor
            # begin with the slot in which training frees it.
            begin = self._until[name] + 1 if name in self._until else self.first_slot(name)
            if begin <= slot:
                spans.append((begin, tensor.bytes, name))
        return spans

    def first_slot(self, name: str) -> int:
        """Return the slot in which training frees a tensor; the number of slots if keeping the tensor costs nothing."""
        slot = self._first.get(name)
        if slot is None:
            tensor = self._tensors[name]
            free_us = math.inf if tensor.free_us is None or not tensor.bytes else tensor.free_us + CLOSE_US
            slot = self._first[name] = bisect.bisect_right(self._end_list, free_us)
        return slot

    def free(self, slot: int) -> float:
        """Return the bytes that the budget leaves in one slot."""
        return float(self._headroom[slot] - self._kept[slot])

    @property
    def peak(self) -> float:
        """Return the peak memory in bytes, including the tensors that are kept."""
        return max(self._outside, float((self.base + self._kept).max(initial=0.0)))


def _in_use(timeline: Sequence[tuple[float, float]], ends: np.ndarray) -> np.ndarray:
    """Return the maximum memory that training uses in each slot, bytes [slots]. ``timeline``: (time in microseconds,
    bytes in use from then on); ``ends``: end of each slot in microseconds."""
    if not len(timeline) or not len(ends):
        return np.zeros(len(ends))
    times, live = np.array(timeline).T
    begins = np.concatenate(([0.0], ends[:-1]))
    current = np.searchsorted(times, begins, side="right") - 1
    most = np.where(current >= 0, live[np.maximum(current, 0)], 0.0)
    slots = np.searchsorted(ends, times, side="right")
    inside = slots < len(ends)
    np.maximum.at(most, slots[inside], live[inside])
    return most


ROUNDING_US = 1e-6
"""Tolerance by which the load of a window may exceed its time, in microseconds."""


class Draft:
    """The operators and windows of one stage, and the decisions that the phases of the planner have taken so far. A
    window is identified by its ``slot``, its position in ``windows``.

    Args:
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
        self.ops = [op for op in trace.ops if op.stage == stage]
        usable = [each for each in trace.windows if each.stage == stage and each.kind in set(kinds) and each.dur_us > 0]
        self.windows = sorted(usable, key=lambda window: window.end_us)
        room = rooms(self.windows)
        self.room = [room[window.id] for window in self.windows]
        self.holdings = Holdings(trace, stage, self.windows, budget)
        self.assign: dict[str, Assignment] = {}
        self.otherwise: dict[str, Assignment] = {}
        self.segments: dict[str, AgcSegment] = {}
        self._changes = Changes(self.ops)
        self._deferrable = {
            op.id
            for op in self.ops
            if op.deterministic and not op.is_verified_at_once and (op.check_us > op.defer_us or not op.defer_us)
        }

    def open(self, op: Operator) -> bool:
        """Return whether the operator may be deferred and is not assigned yet."""
        return op.id in self._deferrable and op.id not in self.assign

    def deadline(self, op: Operator) -> float:
        """Return the time until which the operator must be verified, in microseconds: the next change of one of its
        tensors in place, or the beginning of the optimizer step."""
        return self._changes.next(op)[0]

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

    def defer_segment(self, name: str, segment: AgcSegment, slot: int) -> None:
        """Defer an AGC segment to window ``slot``, into which it fits."""
        self._take(slot, segment.load_us, segment.keeps)
        self.segments[name] = segment
        how = Assignment(deferred_set(self.windows[slot]), segment.window, name)
        self.assign |= dict.fromkeys(segment.ops, how)

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
            meant = self.otherwise.get(op.id, naive) if op.deterministic else in_vain
            found[op.id] = self.assign.get(op.id, meant)
        return found
