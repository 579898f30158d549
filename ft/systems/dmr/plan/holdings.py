"""Account for the memory that a DMR plan keeps for deferred verifications, against the memory budget, over time.

DMR (dual modular redundancy, SpareTrain) verifies an operator by executing it a second time, and may defer this to a
*window*, a time in which the pipeline stage communicates or is idle. The operator's tensors, which training would have
freed, are kept until the window ends.
"""

import bisect
import math
from collections.abc import Iterable, Sequence

import numpy as np

from ft.systems.dmr.plan.trace import CLOSE_US, Tensor, Trace, Window


class Holdings:
    """The memory of one stage, by slots of time: slot k lies between the end of window k - 1 and the end of window k.

    A tensor that is kept for a verification in window k exists until that window ends. It costs memory from the time
    when training would have freed it. A tensor that several verifications need is counted once. Within a slot, the
    maximum that training uses is added to the maximum that is kept, so that the result is never too low.

    Args:
        trace: provides the tensors and the memory that training uses.
        stage: the pipeline stage.
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
