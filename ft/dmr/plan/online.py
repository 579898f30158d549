"""The planner at run time, for operators and windows that differ between iterations (MoE; SpareTrain, Method 4).

Every decision is a function of (queue, what is known now) to (queue, what is executed now, reason). The engine calls
them as operators end, windows open and memory fills; ``serve`` calls them over a trace, and so predicts what they
reach.
"""

from collections.abc import Collection
from dataclasses import dataclass

from ft.dmr.plan.draft import Draft
from ft.dmr.plan.trace import CLOSE_US, Operator


@dataclass(frozen=True)
class Entry:
    """An operator whose verification waits, with the bytes that wait with it."""

    op: str
    check_us: float
    bytes: float


@dataclass(frozen=True)
class Decision:
    """What to do now.

    Args:
        queue: what waits afterwards, oldest first.
        execute: verifications to execute now, in this order.
        reason: why, in words.
    """

    queue: tuple[Entry, ...]
    execute: tuple[Entry, ...] = ()
    reason: str = "nothing to do"


def enqueue(queue: tuple[Entry, ...], entry: Entry, headroom: float) -> Decision:
    """An operator has ended: it waits, unless ``headroom`` bytes do not hold all that waits.

    What is executed then is what is lost least by: the shortest first, until the rest fits.
    """
    return under_pressure((*queue, entry), headroom)


def under_pressure(queue: tuple[Entry, ...], headroom: float) -> Decision:
    """Memory has become scarce: verifications are executed, the shortest first, until the rest fits ``headroom``."""
    held = sum(entry.bytes for entry in queue)
    if held <= headroom:
        return Decision(queue)
    forced: list[Entry] = []
    for entry in sorted(queue, key=lambda entry: (entry.check_us, entry.op)):
        if held <= headroom:
            break
        if entry.bytes:
            forced.append(entry)
            held -= entry.bytes
    return Decision(_without(queue, forced), tuple(forced), f"the memory limit: {headroom:.0f} bytes hold no more")


def at_static_window(queue: tuple[Entry, ...], dur_us: float) -> Decision:
    """A window of known length: the subset that best fits it, longest first (0.975 of the room; exact: 0.976)."""
    left = dur_us
    chosen: list[Entry] = []
    for entry in sorted(queue, key=lambda entry: -entry.check_us):
        if entry.check_us <= left:
            chosen.append(entry)
            left -= entry.check_us
    return Decision(_without(queue, chosen), tuple(chosen), f"{dur_us - left:.0f} of {dur_us:.0f} us filled")


def in_dynamic_window(queue: tuple[Entry, ...], elapsed_us: float, expected_us: float | None = None) -> Decision:
    """The next verification in a window that is still open, the oldest: it has kept memory longest.

    Args:
        elapsed_us: how long it has been open.
        expected_us: how long windows like it have lasted; the oldest that ends by then is taken. None: nothing is
            known, and the last verification may outlast the window.
    """
    for entry in queue:
        if expected_us is None or elapsed_us + entry.check_us <= expected_us:
            return Decision(_without(queue, [entry]), (entry,), "the window is open")
    return Decision(queue, (), "the queue is empty" if not queue else "nothing that waits ends before the window does")


def before_change(queue: tuple[Entry, ...], users: Collection[str]) -> Decision:
    """A tensor is about to be changed in place, or the optimizer to begin: what uses it is executed now."""
    due = [entry for entry in queue if entry.op in users]
    return Decision(_without(queue, due), tuple(due), "a tensor is about to be changed" if due else "nothing to do")


def _without(queue: tuple[Entry, ...], gone: Collection[Entry]) -> tuple[Entry, ...]:
    names = {entry.op for entry in gone}
    return tuple(entry for entry in queue if entry.op not in names)


def serve(draft: Draft) -> None:
    """Runs these decisions over a stage's trace: windows are as long as in the trace."""
    ops = {op.id: op for op in draft.ops}
    waiting = sorted((op for op in draft.ops if draft.open(op)), key=lambda op: op.end_us)
    queue: tuple[Entry, ...] = ()
    arrived = 0
    for slot, window in enumerate(draft.windows):
        while arrived < len(waiting) and waiting[arrived].end_us <= window.start_us + CLOSE_US:
            decision = enqueue(queue, _entry(draft, waiting[arrived]), draft.holdings.free(slot))
            queue = _at_once(draft, decision)
            arrived += 1
        queue = _at_once(draft, under_pressure(queue, draft.holdings.free(slot)))
        late = {entry.op for entry in queue if draft.deadline(ops[entry.op]) < window.end_us - CLOSE_US}
        queue = _at_once(draft, before_change(queue, late))
        queue = _use(draft, ops, queue, slot)


def _use(draft: Draft, ops: dict[str, Operator], queue: tuple[Entry, ...], slot: int) -> tuple[Entry, ...]:
    """What waits after a window."""
    room = draft.room[slot]
    if not draft.windows[slot].dynamic:
        decision = at_static_window(queue, room)
        _defer(draft, ops, decision, slot)
        return decision.queue
    elapsed = 0.0
    while (decision := in_dynamic_window(queue, elapsed, room)).execute:
        _defer(draft, ops, decision, slot)
        elapsed += sum(entry.check_us for entry in decision.execute)
        queue = decision.queue
    return queue


def _defer(draft: Draft, ops: dict[str, Operator], decision: Decision, slot: int) -> None:
    for entry in decision.execute:
        if not draft.defer(ops[entry.op], slot):
            draft.give_up(entry.op)


def _at_once(draft: Draft, decision: Decision) -> tuple[Entry, ...]:
    for entry in decision.execute:
        draft.give_up(entry.op)
    return decision.queue


def _entry(draft: Draft, op: Operator) -> Entry:
    tensors = (draft.trace.tensors[name] for name in dict.fromkeys(op.tensors))
    return Entry(op.id, op.check_us, sum(tensor.bytes for tensor in tensors if tensor.free_us is not None))
