"""The three phases of the DMR planner on the draft of one stage (SpareTrain, Methods 1 to 3).

1. P-DMR (``piggyback``): activation checkpointing executes the operators of a checkpointed segment twice anyway, in
   the forward pass and in the recomputation. These two executions are compared; such operators are in set P of the
   plan.
2. Coarse D-DMR (``coarse``): AGC segments, sequences of neighbouring operators of one transformer block, are deferred
   to windows between units and executed again (replayed) as a whole. Only the boundary tensors of a segment are kept:
   those that it reads from outside, and those that later operators read. The results inside it are compared by
   digests. Gain = verification time hidden - time to regenerate.
3. Fine D-DMR (``fine``): single operators fill the remaining time of windows. The windows are visited in order of
   time; operators that have been executed since the previous window join a queue, of which the longest that fits is
   taken. An operator that is chosen, but that the memory budget cannot keep until the window, becomes naive (verified
   immediately). Operators that are never chosen need no check of their memory.
"""

import bisect
import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate, count, groupby, islice
from typing import NamedTuple

from ft.systems.dmr.plan.draft import Draft
from ft.systems.dmr.plan.trace import CLOSE_US, FORWARD, INTER, PIGGYBACK, RECOMPUTE, AgcSegment, Assignment, Operator


def piggyback(draft: Draft) -> None:
    """Assign set P to every operator of recomputed segments, in the forward pass and in the recomputation.

    Where recomputation leaves out the last operator of a segment, P-DMR executes that operator once more. This could
    also be done in a window (a time in which the stage communicates or is idle), so such an operator is assigned to P
    only if the later phases find no window for it. If executing it again repeats costly communication, it is not
    assigned to P at all.
    """
    twice = executed_twice(draft.ops)
    for op in draft.ops:
        if executes_last_again(draft.trace.early_stop, op):
            if draft.open(op) and op.ac_segment in twice.segments and not op.comm_tail:
                draft.otherwise[op.id] = Assignment(PIGGYBACK)
        elif op.id in twice.ops:
            draft.assign[op.id] = Assignment(PIGGYBACK)


class RepeatedOperators(NamedTuple):
    """Ids of the operators that activation checkpointing executes twice with the same result, and names of the
    checkpointed segments that are recomputed."""

    ops: frozenset[str]
    segments: frozenset[str]


def executed_twice(ops: Sequence[Operator]) -> RepeatedOperators:
    """Return the operators of checkpointed segments that both the forward pass and the recomputation execute.

    The n-th operator of a name in a segment's forward pass corresponds to the n-th operator of that name in its
    recomputation. Recomputation may stop early, and a forward pass without gradients may consist of other operators:
    operators without a counterpart are left out. Operators that change a tensor which other segments or phases change
    as well, such as a counter, are left out too, because they read another value there the second time. A tensor that
    only one segment's forward pass or recomputation changes is taken to be newly created in it.
    """
    found: dict[tuple[str, str], tuple[list[Operator], list[Operator]]] = {}
    changed_in: dict[str, set[tuple[str, str]]] = {}
    for op in ops:
        segment = op.ac_segment or ""
        for name in op.mutates:
            changed_in.setdefault(name, set()).add((segment, op.phase))
        if segment and op.phase in (FORWARD, RECOMPUTE):
            found.setdefault((segment, op.name), ([], []))[op.phase == RECOMPUTE].append(op)

    def alike(op: Operator) -> bool:
        return op.deterministic and all(len(changed_in[name]) == 1 for name in op.mutates)

    pairs = (pair for first, again in found.values() for pair in zip(first, again, strict=False))
    matched = frozenset(op.id for pair in pairs if all(map(alike, pair)) for op in pair)
    return RepeatedOperators(matched, frozenset(segment for (segment, _), (_, again) in found.items() if again))


def executes_last_again(early_stop: bool, op: Operator) -> bool:
    """Return whether P-DMR has to execute this operator once more, because it is the last operator of a checkpointed
    segment and recomputation stops before it (``early_stop``)."""
    return early_stop and op.ac_segment is not None and op.is_segment_last and op.phase == FORWARD


MOST_TRIES, MOST_LOOKED_AT = 64, 512
"""Maximum number of segments of one block that are tried against the memory limit (MOST_TRIES), and that are considered
at all (MOST_LOOKED_AT), best first. A block of n operators has n(n + 1) segments, and in a profile that names no layers
a block has thousands of operators."""

NEAREST, EMPTIEST = 4, 4
"""Number of windows that are tried for a segment: the first NEAREST windows after it that have enough time (they keep
memory for the shortest time), and of all others the EMPTIEST windows with the most time left."""


class InnerActivations(Enum):
    """What happens to the activations that a segment reads and that the block's recomputation could regenerate."""

    KEPT = "kept; regenerated only where memory does not allow it"
    REGENERATED = "regenerated"


@dataclass(frozen=True)
class Candidate:
    """A segment that may be deferred.

    Attributes:
        load_us: duration of a replay, in microseconds.
        tensors: the tensors that are kept.
        again: operators of the recomputation that a replay executes first.
    """

    ops: tuple[Operator, ...]
    load_us: float
    tensors: tuple[str, ...]
    again: tuple[Operator, ...] = ()

    def span(self, draft: Draft) -> tuple[float, float]:
        """Return (end of its execution, time until which its tensors stay unchanged), in microseconds. A replay has to
        lie between the two."""
        executed = max(op.end_us for op in self.ops)
        return executed, min(draft.deadline(op) for op in (*self.again, *self.ops))


def coarse(draft: Draft, inner: InnerActivations = InnerActivations.KEPT) -> None:
    """Assign at most one AGC segment of every block to a window between units (a unit is the forward or backward pass
    of a microbatch)."""
    slots = [slot for slot, window in enumerate(draft.windows) if window.kind in INTER and not window.dynamic]
    if not slots:
        return
    graph = Graph(draft.ops)
    # The last blocks first, because what is executed shortly before a window keeps memory for the shortest time.
    for key, runs in reversed(blocks(draft).items()):
        name = f"agc:{'.'.join(map(str, key))}@{draft.stage}"
        _place_best(draft, runs, slots, name, lambda longest, runs=runs: _by_gain(runs, graph, longest, inner))


def blocks(draft: Draft) -> dict[tuple, list[list[Operator]]]:
    """Return transformer block -> its runs of neighbouring operators that are not assigned yet, in order of time."""
    found: dict[tuple, list[list[Operator]]] = {}
    for (free, key), run in groupby(draft.ops, key=lambda op: (draft.open(op), _block(op))):
        if free:
            found.setdefault(key, []).append(list(run))
    return found


def _block(op: Operator) -> tuple:
    return op.microbatch, op.chunk, op.layer, op.phase


def _place_best(
    draft: Draft,
    runs: Sequence[list[Operator]],
    slots: list[int],
    name: str,
    by_gain: Callable[[float], Iterator[Candidate]],
) -> None:
    earliest = min(run[0].end_us for run in runs)
    behind = [slot for slot in slots if draft.windows[slot].start_us >= earliest]
    longest = max((draft.room[slot] for slot in behind), default=0.0)
    for candidate in islice(by_gain(longest), MOST_TRIES):
        for slot in _worth_trying(draft, candidate, behind):
            if draft.holdings.fits(candidate.tensors, slot):
                ids, again = (tuple(op.id for op in ops) for ops in (candidate.ops, candidate.again))
                where = draft.windows[slot].id
                draft.defer_segment(name, AgcSegment(ids, where, candidate.tensors, candidate.load_us, again), slot)
                return


def _worth_trying(draft: Draft, candidate: Candidate, behind: list[int]) -> Iterator[int]:
    span = candidate.span(draft)
    able = (slot for slot in behind if draft.room[slot] >= candidate.load_us and draft.within(slot, *span))
    yield from islice(able, NEAREST)
    yield from heapq.nlargest(EMPTIEST, able, key=lambda slot: draft.room[slot])


def _by_gain(
    runs: Sequence[list[Operator]], graph: "Graph", longest: float, inner: InnerActivations
) -> Iterator[Candidate]:
    """Yield segments by decreasing Gain, each with a replay of at most ``longest`` microseconds."""
    waiting: list[tuple[float, int, Candidate]] = []
    made = count()
    for gain, ops in islice(_by_time(runs, longest), MOST_LOOKED_AT):
        while waiting and waiting[0][0] <= -gain:
            yield heapq.heappop(waiting)[2]
        other = graph.regenerated(ops)
        if other is None or inner is InnerActivations.KEPT:
            yield graph.kept(ops)
        # Considered only after the same segment with its activations kept, which has the larger Gain.
        if other is not None and other.load_us <= longest and gain > (extra := sum(op.t_us for op in other.again)):
            heapq.heappush(waiting, (extra - gain, next(made), other))
    while waiting:
        yield heapq.heappop(waiting)[2]


def _by_time(runs: Sequence[list[Operator]], longest: float) -> Iterator[tuple[float, tuple[Operator, ...]]]:
    """Yield (verification time, operators) of all contiguous parts of the runs, the longest first; parts above
    ``longest`` microseconds are left out."""
    sums = [list(accumulate((op.check_us for op in run), initial=0.0)) for run in runs]
    heads = []
    for r, sofar in enumerate(sums):
        last = 0
        for first in range(len(sofar) - 1):
            last = max(last, first)
            while last < len(sofar) - 1 and sofar[last + 1] - sofar[first] <= longest:
                last += 1
            if last > first:
                heads.append((sofar[first] - sofar[last], r, first, last))
    heapq.heapify(heads)
    while heads:
        negative, r, first, last = heapq.heappop(heads)
        yield -negative, tuple(runs[r][first:last])
        if last > first + 1:
            heapq.heappush(heads, (sums[r][first] - sums[r][last - 1], r, first, last - 1))


class Graph:
    """The operators that write and read each tensor of one stage."""

    def __init__(self, ops: Sequence[Operator]):
        self._producer = {name: op for op in ops for name in op.out_ids}
        self._readers: dict[str, list[str]] = {}
        self._recomputed: dict[tuple, list[Operator]] = {}
        for op in ops:
            for name in op.in_ids:
                self._readers.setdefault(name, []).append(op.id)
            if op.phase == RECOMPUTE:
                self._recomputed.setdefault(_block(op)[:3], []).append(op)

    def kept(self, ops: tuple[Operator, ...]) -> Candidate:
        """Return the segment with all its boundary tensors kept."""
        return Candidate(ops, sum(op.check_us for op in ops), tuple(self._boundary(ops)))

    def _boundary(self, ops: tuple[Operator, ...]) -> list[str]:
        ids = {op.id for op in ops}
        written = {name for op in ops for name in op.out_ids}
        read = [name for op in ops for name in op.in_ids if name not in written]
        handed_on = [
            name for name in written if not set(self._readers.get(name, ())) or not ids >= set(self._readers[name])
        ]
        return list(dict.fromkeys(read + sorted(handed_on)))

    def regenerated(self, ops: tuple[Operator, ...]) -> Candidate | None:
        """Return the segment with the recomputation executed once more. Return None if the segment reads nothing of the
        recomputation, or if the recomputation takes no time, would not give the same bits, or would change something in
        place a second time."""
        block = _block(ops[0])[:3]
        again = self._recomputed.get(block, [])
        boundary = self._boundary(ops)
        inner = [name for name in boundary if _of(self._producer.get(name), block)]
        if not inner:
            return None
        last = max(i for i, op in enumerate(again) if set(op.out_ids) & set(inner))
        replayed = tuple(again[: last + 1])
        if any(op.mutates or not op.deterministic for op in replayed):
            return None
        written = {name for op in replayed for name in op.out_ids}
        needed = [name for op in replayed for name in op.in_ids if name not in written]
        tensors = dict.fromkeys([name for name in boundary if name not in written] + needed)
        extra = sum(op.t_us for op in replayed)
        if not extra:
            return None
        return Candidate(ops, sum(op.check_us for op in ops) + extra, tuple(tensors), replayed)


def _of(producer: Operator | None, block: tuple) -> bool:
    return producer is not None and producer.phase == RECOMPUTE and _block(producer)[:3] == block


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
