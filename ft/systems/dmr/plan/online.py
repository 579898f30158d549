"""DMR decisions at run time, where operators and windows differ between iterations (MoE; SpareTrain, Method 4).

A window is *dynamic* if its duration differs in every iteration: a plan cannot assign operators to it, so the decision
is taken at run time, on the queue of deferred verifications (:class:`DeferredQueue`), when operators end, windows open
and memory fills. ``serve`` takes these decisions on a trace, and so predicts their effect. Each decision takes about
logarithmic time in the length of the queue, because thousands of verifications may be deferred on a stage without
windows.
"""

import bisect
import heapq
import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ft.systems.dmr.plan.phases import Draft
from ft.systems.dmr.plan.trace import CLOSE_US, Operator, Window


class DeferredCheck(NamedTuple):
    """A deferred verification, known by its ``key``: its duration in microseconds, and the bytes of memory that are
    kept until then and would be free otherwise."""

    key: Any
    check_us: float
    bytes: float


class DeferredQueue:
    """The queue of deferred verifications (entries), in the order of their arrival. Every method that returns entries
    removes them from the queue. ``held``: memory that is kept for all entries, in bytes."""

    def __init__(self):
        self._entries: dict[Any, DeferredCheck] = {}
        self._by_time: list[tuple[float, int, DeferredCheck]] = []
        self._holding: list[tuple[float, Any, DeferredCheck]] = []
        self._number: dict[Any, int] = {}
        self._came = 0
        self.held = 0.0

    def __iter__(self) -> Iterator[DeferredCheck]:
        return iter(self._entries.values())

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: Any) -> bool:
        return key in self._entries

    def put(self, entry: DeferredCheck) -> None:
        """Add an entry."""
        self._came += 1
        self._entries[entry.key], self._number[entry.key] = entry, self._came
        # Of equally long entries the oldest is last in the list and is taken first.
        bisect.insort(self._by_time, (entry.check_us, -self._came, entry))
        if entry.bytes:
            bisect.insort(self._holding, (entry.check_us, entry.key, entry))
            self.held += entry.bytes

    def take(self, key: Any) -> DeferredCheck:
        """Remove and return the entry of a key.

        Raises:
            KeyError: there is no such entry.
        """
        entry = self._entries.pop(key)
        number = self._number.pop(key)
        del self._by_time[bisect.bisect_left(self._by_time, (entry.check_us, -number))]
        if entry.bytes:
            del self._holding[bisect.bisect_left(self._holding, (entry.check_us, key))]
            # Reset to 0 when nothing is held, because sums of fractional sizes are not exact.
            self.held = self.held - entry.bytes if self._holding else 0.0
        return entry

    def press(self, headroom: float, longest_us: float = math.inf) -> list[DeferredCheck]:
        """Remove and return the entries that have to be executed immediately so that the rest fits into ``headroom``
        bytes of memory. Entries that take longer than the longest window that will come soon would keep their memory
        for long, and are removed first, in order of decreasing duration. Then other entries are removed, in order of
        increasing duration."""
        forced = []
        while self.held > headroom and self._holding:
            last, first = self._holding[-1][2], self._holding[0][2]
            forced.append(self.take((last if last.check_us > longest_us else first).key))
        return forced

    def fill(self, dur_us: float) -> list[DeferredCheck]:
        """Remove and return a subset that fills a window of ``dur_us`` microseconds, longest entry first. (This greedy
        choice fills 0.975 of the time, an exact choice 0.976.)"""
        chosen = []
        while place := bisect.bisect_right(self._by_time, dur_us, key=lambda each: each[0]):
            entry = self.take(self._by_time[place - 1][2].key)
            chosen.append(entry)
            dur_us -= entry.check_us
        return chosen

    def oldest(self, at_most_us: float = math.inf) -> DeferredCheck | None:
        """Remove and return the oldest entry that takes at most ``at_most_us`` microseconds; None if there is none."""
        if not self._by_time or self._by_time[0][0] > at_most_us:
            return None
        return self.take(next(entry.key for entry in self if entry.check_us <= at_most_us))


SOON = 256
"""Where memory is scarce, verifications that are longer than each of the next SOON windows are the first to be executed
immediately."""


def serve(draft: Draft) -> None:
    """Plan a stage by taking the run-time decisions of this module on its trace, with windows as long as in the
    trace."""
    ops = {op.id: op for op in draft.ops}
    arriving = deque(sorted((op for op in draft.ops if draft.open(op)), key=lambda op: op.end_us))
    waiting = DeferredQueue()
    deadlines: list[tuple[float, str]] = []
    for slot, (window, longest_us) in enumerate(zip(draft.windows, _longest_soon(draft.windows), strict=True)):
        headroom = draft.holdings.free(slot)
        while arriving and arriving[0].end_us <= window.start_us + CLOSE_US:
            op = arriving.popleft()
            waiting.put(_entry(draft, op))
            heapq.heappush(deadlines, (draft.deadline(op), op.id))
            _at_once(draft, waiting.press(headroom, longest_us))
        _at_once(draft, waiting.press(headroom, longest_us))
        while deadlines and deadlines[0][0] < window.end_us - CLOSE_US:
            late = heapq.heappop(deadlines)[1]
            if late in waiting:
                _at_once(draft, [waiting.take(late)])
        _use(draft, ops, waiting, slot)


def _longest_soon(windows: Sequence[Window]) -> list[float]:
    """Return for each window the duration of the longest among it and the ``SOON`` - 1 windows that follow it."""
    found = [0.0] * len(windows)
    descending: deque[int] = deque()
    for slot in reversed(range(len(windows))):
        while descending and windows[descending[-1]].dur_us <= windows[slot].dur_us:
            descending.pop()
        descending.append(slot)
        while descending[0] >= slot + SOON:
            descending.popleft()
        found[slot] = windows[descending[0]].dur_us
    return found


def _use(draft: Draft, ops: Mapping[str, Operator], waiting: DeferredQueue, slot: int) -> None:
    """Execute deferred verifications in a window."""
    room = draft.room[slot]
    if not draft.windows[slot].dynamic:
        for entry in waiting.fill(room):
            _defer(draft, ops[entry.key], slot)
        return
    while (entry := waiting.oldest(room)) is not None:
        _defer(draft, ops[entry.key], slot)
        room -= entry.check_us


def _defer(draft: Draft, op: Operator, slot: int) -> None:
    if not draft.defer(op, slot):
        draft.give_up(op.id)


def _at_once(draft: Draft, entries: Iterable[DeferredCheck]) -> None:
    for entry in entries:
        draft.give_up(entry.key)


def _entry(draft: Draft, op: Operator) -> DeferredCheck:
    tensors = (draft.trace.tensors[name] for name in dict.fromkeys(op.tensors))
    return DeferredCheck(op.id, op.check_us, sum(tensor.bytes for tensor in tensors if tensor.free_us is not None))
