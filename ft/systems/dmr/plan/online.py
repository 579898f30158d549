"""The planner at run time, for operators and windows that differ between iterations (MoE; SpareTrain, Method 4).

Every decision is a function of (queue, what is known now) to (queue, what is executed now, reason), called when
operators end, windows open and memory fills. ``Waiting`` takes the same decisions on one mutable queue; ``serve``
applies them to a trace, and so predicts their effect.
"""

import heapq
import math
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ft.systems.dmr.plan.draft import Draft
from ft.systems.dmr.plan.trace import CLOSE_US, Operator, Window
from ft.systems.dmr.plan.waiting import Entry, Waiting

SOON = 256
"""Number of windows within which a verification should find one that is long enough, where memory is scarce."""


@dataclass(frozen=True)
class Decision:
    """What to do now.

    Args:
        queue: what is deferred afterwards, oldest first.
        execute: verifications to execute now, in this order.
        reason: explanation in words.
    """

    queue: tuple[Entry, ...]
    execute: tuple[Entry, ...] = ()
    reason: str = "nothing to do"


def enqueue(queue: tuple[Entry, ...], entry: Entry, headroom: float, longest_us: float = math.inf) -> Decision:
    """Decide when an operator has ended: defer it, unless ``headroom`` bytes do not suffice for all deferred entries
    (``under_pressure``)."""
    return under_pressure((*queue, entry), headroom, longest_us)


def under_pressure(queue: tuple[Entry, ...], headroom: float, longest_us: float = math.inf) -> Decision:
    """Decide when memory is scarce: execute verifications until the rest fits into ``headroom``.

    Args:
        queue: what is deferred.
        headroom: available memory, in bytes.
        longest_us: the longest window that will come soon, in microseconds. Verifications that fit no such window go
            first, then the shortest.
    """
    waiting = Waiting(queue)
    forced = waiting.press(headroom, longest_us)
    return _decision(waiting, forced, f"the memory limit: {headroom:.0f} bytes hold no more")


def at_static_window(queue: tuple[Entry, ...], dur_us: float) -> Decision:
    """Decide at a window of known length: execute the subset that best fits it, longest first."""
    waiting = Waiting(queue)
    chosen = waiting.fill(dur_us)
    used = sum(entry.check_us for entry in chosen)
    return Decision(tuple(waiting), tuple(chosen), f"{used:.0f} of {dur_us:.0f} us filled")


def in_dynamic_window(queue: tuple[Entry, ...], elapsed_us: float, expected_us: float | None = None) -> Decision:
    """Decide in a window that is still open: execute the oldest verification, which has kept memory for the longest
    time.

    Args:
        queue: what is deferred.
        elapsed_us: time since the window opened, in microseconds.
        expected_us: how long windows like it have lasted, in microseconds; the oldest verification that ends by then is
            taken. None: nothing is known, and the last verification may outlast the window.
    """
    waiting = Waiting(queue)
    entry = waiting.oldest(math.inf if expected_us is None else expected_us - elapsed_us)
    if entry is not None:
        return Decision(tuple(waiting), (entry,), "the window is open")
    return Decision(queue, (), "the queue is empty" if not queue else "nothing that waits ends before the window does")


def before_change(queue: tuple[Entry, ...], users: Collection[str]) -> Decision:
    """Decide before a tensor is changed in place or the optimizer begins: execute the operators in ``users``."""
    waiting = Waiting(queue)
    due = [waiting.take(entry.op) for entry in queue if entry.op in users]
    return _decision(waiting, due, "a tensor is about to be changed")


def _decision(waiting: Waiting, execute: list[Entry], reason: str) -> Decision:
    return Decision(tuple(waiting), tuple(execute), reason) if execute else Decision(tuple(waiting))


def serve(draft: Draft) -> None:
    """Apply these decisions to the trace of a stage, with windows as long as in the trace."""
    ops = {op.id: op for op in draft.ops}
    arriving = deque(sorted((op for op in draft.ops if draft.open(op)), key=lambda op: op.end_us))
    waiting = Waiting()
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


def _use(draft: Draft, ops: Mapping[str, Operator], waiting: Waiting, slot: int) -> None:
    """Execute deferred verifications in a window."""
    room = draft.room[slot]
    if not draft.windows[slot].dynamic:
        for entry in waiting.fill(room):
            _defer(draft, ops[entry.op], slot)
        return
    while (entry := waiting.oldest(room)) is not None:
        _defer(draft, ops[entry.op], slot)
        room -= entry.check_us


def _defer(draft: Draft, op: Operator, slot: int) -> None:
    if not draft.defer(op, slot):
        draft.give_up(op.id)


def _at_once(draft: Draft, entries: Iterable[Entry]) -> None:
    for entry in entries:
        draft.give_up(entry.op)


def _entry(draft: Draft, op: Operator) -> Entry:
    tensors = (draft.trace.tensors[name] for name in dict.fromkeys(op.tensors))
    return Entry(op.id, op.check_us, sum(tensor.bytes for tensor in tensors if tensor.free_us is not None))
