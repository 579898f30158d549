"""Phase 3 of the DMR planner, fine D-DMR: fill the remaining time of windows with single operators (SpareTrain, Method
3).

DMR (dual modular redundancy) verifies an operator by executing it a second time; D-DMR defers this to a *window*, a
time in which the pipeline stage communicates or is idle. The windows are visited in order of time. At each window, the
operators that have been executed since the previous window are added to a queue, and operators are taken from the queue
to fill the window, longest first. An operator that is chosen, but that the memory budget cannot keep until the window,
becomes naive (verified immediately). Operators that are never chosen need no check of their memory.
"""

import bisect

from ft.systems.dmr.plan.draft import Draft
from ft.systems.dmr.plan.trace import CLOSE_US, Operator


def fine(draft: Draft) -> None:
    """Assign operators that are not assigned yet to windows, in order of time. Operators that fit into no window stay
    unassigned, and will be verified immediately."""
    waiting = [op for op in draft.ops if draft.open(op)]
    waiting.sort(key=lambda op: op.end_us)
    queue = _Queue()
    arrived = 0
    by_start = sorted(range(len(draft.windows)), key=lambda slot: draft.windows[slot].start_us)
    for slot in by_start:
        window = draft.windows[slot]
        if window.dynamic:
            continue
        while arrived < len(waiting) and waiting[arrived].end_us <= window.start_us + CLOSE_US:
            queue.put(waiting[arrived])
            arrived += 1
        _fill(draft, queue, slot)


def _fill(draft: Draft, queue: "_Queue", slot: int) -> None:
    """Assign operators of the queue to window ``slot``, each time the longest that fits the time left."""
    while (op := queue.longest(draft.room[slot])) is not None:
        queue.remove(op)
        if not draft.reaches(op, slot) or not draft.defer(op, slot):
            # A later window is not tried, because the operator's tensors would be kept even longer.
            draft.give_up(op.id)


class _Queue:
    """Operators sorted by the duration of their verification. Of equally long operators, the one that was executed last
    is taken first, because it keeps memory for the shortest time."""

    def __init__(self):
        self._sorted: list[tuple[float, float, str, Operator]] = []

    def put(self, op: Operator) -> None:
        bisect.insort(self._sorted, _entry(op))

    def remove(self, op: Operator) -> None:
        del self._sorted[bisect.bisect_left(self._sorted, _entry(op))]

    def longest(self, at_most_us: float) -> Operator | None:
        """Return the longest operator that takes at most ``at_most_us`` microseconds; None if there is none."""
        place = bisect.bisect_right(self._sorted, at_most_us, key=lambda entry: entry[0])
        return self._sorted[place - 1][3] if place else None


def _entry(op: Operator) -> tuple[float, float, str, Operator]:
    return (op.check_us, op.end_us, op.id, op)
