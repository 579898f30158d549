"""DMR decisions at run time, where operators and windows differ between iterations (MoE; SpareTrain, Method 4).

DMR (dual modular redundancy) verifies an operator by executing it a second time, and may defer this to a *window*, a
time in which the rank communicates or is idle. A window is *dynamic* if its duration differs in every iteration: a plan
cannot assign operators to it, so the decision is taken at run time, on the queue of deferred verifications
(:class:`ft.systems.dmr.plan.waiting.Waiting`), when operators end, windows open and memory fills. ``serve`` takes these
decisions on a trace, and so predicts their effect.
"""

import heapq
from collections import deque
from collections.abc import Iterable, Mapping, Sequence

from ft.systems.dmr.plan.draft import Draft
from ft.systems.dmr.plan.trace import CLOSE_US, Operator, Window
from ft.systems.dmr.plan.waiting import Entry, Waiting

SOON = 256
"""Where memory is scarce, verifications that are longer than each of the next SOON windows are the first to be executed
immediately."""


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
