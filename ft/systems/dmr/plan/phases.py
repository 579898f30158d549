"""The plan of one pipeline stage while it is made (the draft: assignments, time left in windows, memory that is kept),
and the three phases of the DMR planner, which make it (SpareTrain, Methods 1 to 3).

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

Until a deferred verification has run, the tensors of its operators are kept, which training would have freed. They are
counted against the memory budget over time.
"""

import bisect
import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate, count, groupby, islice
from typing import NamedTuple

import numpy as np

from ft.systems.dmr.plan.trace import (
    CLOSE_US,
    FORWARD,
    INTER,
    NAIVE,
    PIGGYBACK,
    RECOMPUTE,
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


class HeldTensors:
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
        self.holdings = HeldTensors(trace, stage, self.windows, budget)
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
    graph = TensorGraph(draft.ops)
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
    runs: Sequence[list[Operator]], graph: "TensorGraph", longest: float, inner: InnerActivations
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


class TensorGraph:
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
