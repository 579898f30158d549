"""DMR decisions at run time, where operators and windows differ between iterations (MoE; SpareTrain, Method 4).

DMR (dual modular redundancy) verifies an operator by executing it a second time, and may defer this to a *window*, a
time in which the rank communicates or is idle. A window is *dynamic* if its duration differs in every iteration: a plan
cannot assign operators to it, so the decision is taken at run time.

Each decision is a pure function from the queue of deferred verifications and the current situation to a ``Decision``:
what remains in the queue, what is executed now, and why. Decisions are taken when operators end, windows open and
memory fills. ``Waiting`` takes the same decisions on one mutable queue; ``serve`` applies them to a trace, and so
predicts their effect.
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
"""Where memory is scarce, verifications that are longer than each of the next SOON windows are the first to be executed
immediately."""


@dataclass(frozen=True)
class Decision:
    """The result of a decision.

    Args:
        queue: verifications that are still deferred after the decision, oldest first.
        execute: verifications to execute now, in this order.
        reason: explanation in words.
    """

    queue: tuple[Entry, ...]
    execute: tuple[Entry, ...] = ()
    reason: str = "nothing to do"


def enqueue(queue: tuple[Entry, ...], entry: Entry, headroom: float, longest_us: float = math.inf) -> Decision:
    """Decide when an operator has ended: add ``entry``, its verification, to the queue. If the queue then keeps more
    than ``headroom`` bytes, execute some verifications now, as ``under_pressure`` does."""
    return under_pressure((*queue, entry), headroom, longest_us)


def under_pressure(queue: tuple[Entry, ...], headroom: float, longest_us: float = math.inf) -> Decision:
    """Decide when memory is scarce: execute verifications until the others fit into ``headroom``.

    Args:
        queue: the deferred verifications, oldest first.
        headroom: available memory, in bytes.
        longest_us: the longest window that will come soon, in microseconds. Verifications that are longer are executed
            first, then the shortest.
    """
    waiting = Waiting(queue)
    forced = waiting.press(headroom, longest_us)
    return _decision(waiting, forced, f"the memory limit: {headroom:.0f} bytes hold no more")


def at_static_window(queue: tuple[Entry, ...], dur_us: float) -> Decision:
    """Decide at a window of ``dur_us`` microseconds: execute the subset of the queue that fills it best, longest
    first."""
    waiting = Waiting(queue)
    chosen = waiting.fill(dur_us)
    used = sum(entry.check_us for entry in chosen)
    return Decision(tuple(waiting), tuple(chosen), f"{used:.0f} of {dur_us:.0f} us filled")


def in_dynamic_window(queue: tuple[Entry, ...], elapsed_us: float, expected_us: float | None = None) -> Decision:
    """Decide in a window that is still open: execute the oldest verification, which has kept memory for the longest
    time.

    Args:
        queue: the deferred verifications, oldest first.
        elapsed_us: time since the window opened, in microseconds.
        expected_us: expected duration of the window, in microseconds; the oldest verification that ends by then is
            chosen. None: the duration is unknown, the oldest verification is chosen, and may outlast the window.
    """
    waiting = Waiting(queue)
    entry = waiting.oldest(math.inf if expected_us is None else expected_us - elapsed_us)
    if entry is not None:
        return Decision(tuple(waiting), (entry,), "the window is open")
    return Decision(queue, (), "the queue is empty" if not queue else "nothing that waits ends before the window does")


def before_change(queue: tuple[Entry, ...], users: Collection[str]) -> Decision:
    """Decide before a tensor is changed in place or the optimizer begins: execute the deferred verifications of the
    operators whose ids are in ``users``, which read that tensor."""
    waiting = Waiting(queue)
    due = [waiting.take(entry.op) for entry in queue if entry.op in users]
    return _decision(waiting, due, "a tensor is about to be changed")


def _decision(waiting: Waiting, execute: list[Entry], reason: str) -> Decision:
    return Decision(tuple(waiting), tuple(execute), reason) if execute else Decision(tuple(waiting))


def serve(draft: Draft) -> None:
    """Plan a stage by taking the run-time decisions of this module on its trace, with windows as long as in the
    trace."""
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
