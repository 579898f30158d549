"""Phase 3, fine D-DMR: fill the remaining time of windows with single operators (SpareTrain, Method 3).

The queue is in execution order: at every window, the operators since the previous one are enqueued, those that the
memory budget cannot keep until then are demoted to naive, and a subset that best fits the window is taken, longest
first. Demotion is lazy: memory is only checked for operators that are chosen for a window.
"""

import bisect

from ft.systems.dmr.plan.draft import Draft
from ft.systems.dmr.plan.trace import CLOSE_US, Operator


def fine(draft: Draft) -> None:
    """Assign open operators to windows, in order of time; those that fit none are verified immediately."""
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
    """Take repeatedly the longest operator that fits the time left."""
    while (op := queue.longest(draft.room[slot])) is not None:
        queue.remove(op)
        if not draft.reaches(op, slot) or not draft.defer(op, slot):
            # Deferring it to a later window would keep its tensors even longer.
            draft.give_up(op.id)


class _Queue:
    """Operators sorted by the duration of their verification; of equally long ones, the latest is taken first, because
    it keeps memory for the shortest time."""

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
