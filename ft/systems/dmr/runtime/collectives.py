"""Verify what ranks exchange: the results of collectives, even if the library computes wrongly, and the messages of the
pipeline.

A collective of one rank alone cannot be executed twice. Instead:

- all-reduce: all members have the same result, and it is the sum of their parts.
- reduce-scatter: each piece is the sum of the parts.
- all-gather: all members have the same result, and each one's own piece is what it has put in.
- all-to-all: the digest of each piece is the one that its sender has computed.

Only digests and sums of blocks are exchanged, once at the end of an iteration.

A library adds the parts of several ranks in an order that nobody knows, so its result cannot be computed again bit for
bit. But the sum of a block of elements of the result must equal the sum of that block over all ranks' parts, up to
rounding: in whatever order n numbers are added, rounding changes their sum by at most (n - 1) u / (1 - (n - 1) u) times
the sum of their magnitudes (Higham, Accuracy and Stability of Numerical Algorithms, section 4.2; u: unit roundoff). An
error is found for certain if it changes the sum of a block by more than twice 2 (n + 1) u times the sum of magnitudes
of the block; a smaller one may not be seen. With numbers of like magnitude on 8 ranks, that is a change of one element
by two thousandths of it in fp32, and by 18 times its magnitude in bf16, such as a flip of an upper bit of an exponent.

A stage computes the digest of what it receives and of what it sends. All digests of an iteration are exchanged together
at its end, because an additional message for each digest would cost more than computing it. With P stages, model chunk
c of stage s is number c * P + s in the order in which a microbatch passes through the chunks (its global stage). In
CheckFree+ microbatches have other orders (routes).
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ft.systems.dmr.digest import native, writer
from ft.systems.dmr.plan.trace import BACKWARD, FORWARD
from ft.systems.dmr.runtime.cursor import NO_LAYER, OperatorCall
from ft.systems.dmr.runtime.findings import DISPUTED, MESSAGE, REDUCTION, SUM, Findings, Mismatch

_BLOCKS = {4: 1024, 2: 128}
"""Size of an element in bytes -> elements of a block. With smaller blocks smaller errors are found, and more is
exchanged: 16 bytes for each."""
_FP64 = 1e-12
"""Upper bound of the relative rounding error of the block sums themselves."""


def block_sums(values: torch.Tensor, pieces: int) -> torch.Tensor:
    """Return the sums of blocks, and the sums of magnitudes, as fp64 [2, pieces, blocks of a piece], of floating-point
    numbers of any shape. Each of the ``pieces`` of equal size begins with a new block."""
    found = [_sums(blocks) for blocks in _in_blocks(values, pieces)]
    return found[0] if len(found) == 1 else torch.cat(found, dim=2)


def _in_blocks(values: torch.Tensor, pieces: int) -> list[torch.Tensor]:
    """Return views [pieces, blocks, elements] of the whole blocks and, if elements remain, of the shorter last one."""
    rows, block = values.detach().reshape(pieces, -1), block_of(values)
    whole = rows.shape[1] // block * block
    found = [rows[:, :whole].unflatten(1, (-1, block))] if whole else []
    if whole < rows.shape[1]:
        found.append(rows[:, None, whole:])
    return found


def block_of(values: torch.Tensor) -> int:
    """Return the number of elements of a block."""
    return _BLOCKS.get(values.element_size(), _BLOCKS[4])


def _sums(blocks: torch.Tensor) -> torch.Tensor:
    """Return the sums and the sums of magnitudes, fp64 [2, pieces, blocks], of blocks [pieces, blocks, elements]."""
    is_single = blocks.dtype.itemsize < 8
    if is_single and blocks.device.type == "cpu" and native.library() is not None:
        return native.block_sums(blocks.float())
    magnitudes = torch.linalg.vector_norm(blocks, 1, -1, dtype=torch.float64)
    return torch.stack((blocks.sum(-1, dtype=torch.float64), magnitudes))


def verdicts(member: int, results: Sequence[Sequence[Sequence[int]]]) -> list[str | None]:
    """Return, for each collective, whether the result of ``member`` is right.

    None: the majority of the group has the same result; REDUCTION: the majority has another one; DISPUTED: there is no
    majority.

    Args:
        member: index of the member in its group.
        results: ``results[m][i]`` is the digest of the result of collective i on member m.
    """
    found: list[str | None] = []
    for digests in zip(*results, strict=True):
        counts = Counter(map(tuple, digests))
        most, count = counts.most_common(1)[0]
        if 2 * count <= len(digests):
            found.append(DISPUTED)
        else:
            found.append(None if tuple(digests[member]) == most else REDUCTION)
    return found


ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER, ALL_TO_ALL = "all_reduce", "reduce_scatter", "all_gather", "all_to_all"


@dataclass(eq=False)
class Begun:
    """A collective that has begun.

    Attributes:
        outputs: the tensors that receive the result, a rank's piece after the other's.
        source: what this rank puts in.
        part: block sums of ``source``, where sums are verified.
        is_mean: whether the result is the mean of the parts.
        sent: digests of the pieces of ``source``, int64 [members, 2], of an all-to-all.
        splits: sizes of the pieces of the output along its first dimension, of an all-to-all.
    """

    kind: str
    group: dist.ProcessGroup
    outputs: Sequence[torch.Tensor]
    source: torch.Tensor
    at: OperatorCall
    part: torch.Tensor | None = None
    is_mean: bool = False
    sent: torch.Tensor | None = None
    splits: Sequence[int] = ()


class _Sum(NamedTuple):
    """A reduction that has ended.

    Attributes:
        at: the operator that has called it.
        part: block sums of what this rank has put in, fp64 [2, pieces, blocks of a piece].
        result: block sums of what it got out, fp64 [blocks].
        limits: by what the sums of all parts are multiplied, the relative and the absolute rounding error, and the
            magnitude above which a partial sum may have overflowed.
    """

    at: OperatorCall
    part: torch.Tensor
    result: torch.Tensor
    limits: tuple[float, float, float, float]


class _Group:
    """The collectives of one rank in one process group and one iteration."""

    def __init__(self, findings: Findings, group: dist.ProcessGroup):
        self._findings, self._group = findings, group
        self._size, self._rank = dist.get_world_size(group), dist.get_rank(group)
        self._equal, self._places = findings.rows(), list[OperatorCall]()
        self._differs = torch.zeros(0, dtype=torch.bool, device=findings.device)
        self._sums: list[_Sum] = []
        self._wrong: torch.Tensor | None = None
        self._pieces: list[tuple[OperatorCall, torch.Tensor, torch.Tensor]] = []

    def ended(self, begun: Begun) -> None:
        """Read the result of a collective that is complete."""
        if begun.kind in (ALL_REDUCE, ALL_GATHER):
            for output in begun.outputs:
                self._equal.add(output.detach())
                self._places.append(begun.at)
        if begun.part is not None:
            self._add_sum(begun.part, begun)
        elif begun.kind == ALL_GATHER:
            self._compare_own(begun)
        elif begun.sent is not None:
            self._pieces.append((begun.at, begun.sent, digests(self._findings, begun.outputs[0], begun.splits)))

    def _add_sum(self, part: torch.Tensor, begun: Begun) -> None:
        result = begun.outputs[0]
        numbers = torch.finfo(result.dtype)
        share = 1.0 / self._size if begun.is_mean else 1.0
        # eps is 2 u, and a mean is rounded once more; below tiny, rounding is no longer relative
        relative, absolute = (self._size + 1) * numbers.eps, numbers.tiny * block_of(result) * self._size
        sums = torch.cat([_sums(blocks)[0].flatten() for blocks in _in_blocks(result, 1)])
        self._sums.append(_Sum(begun.at, part, sums, (share, relative, absolute, numbers.max / 2)))

    def _compare_own(self, begun: Begun) -> None:
        """Compare this rank's own piece of an all-gather with what it has put in, unless both are the same memory."""
        outputs, source = begun.outputs, begun.source
        own = outputs[self._rank] if len(outputs) > 1 else outputs[0].reshape(self._size, -1)[self._rank]
        if own.untyped_storage()._cdata != source.untyped_storage()._cdata:
            self._findings.pair(begun.at, MESSAGE, [own.reshape(-1)], [source.detach().reshape(-1)])

    def compare(self) -> None:
        """Compare what was recorded with the other members' records, for the flag of ``Findings``. Collective."""
        if self._places:
            self._compare_equal()
        if self._sums:
            self._compare_sums()
        if self._pieces:
            places, sent, received = zip(*self._pieces, strict=True)
            everybody = self._gathered(torch.stack(sent))
            expected = torch.stack(everybody, dim=1)[:, :, self._rank]
            rows = [(at, MESSAGE) for at in places for _ in everybody]
            self._findings.tables(rows, expected.flatten(0, 1), torch.stack(received).flatten(0, 1))

    def _gathered(self, mine: torch.Tensor) -> list[torch.Tensor]:
        found = [torch.empty_like(mine) for _ in range(self._size)]
        dist.all_gather(found, mine, group=self._group)
        return found

    def _compare_equal(self) -> None:
        found = self._equal.table()
        both = torch.stack((found, ~found))
        dist.all_reduce(both, op=dist.ReduceOp.MAX, group=self._group)
        largest, smallest = both[0], ~both[1]
        self._findings.hint(smallest, largest)
        self._differs = (smallest != largest).any(dim=1)

    def _compare_sums(self) -> None:
        mine = torch.cat([one.part.flatten(1) for one in self._sums], dim=1)
        dist.all_reduce(mine, group=self._group)
        expected, first = [], 0
        for one in self._sums:
            _, pieces, blocks = one.part.shape
            at = first + (self._rank * blocks if pieces > 1 else 0)
            expected.append(mine[:, at : at + blocks])
            first += pieces * blocks
        totals, magnitudes = torch.cat(expected, dim=1)
        found = torch.cat([one.result for one in self._sums])
        counts = torch.tensor([len(one.result) for one in self._sums])
        limits = torch.tensor([one.limits for one in self._sums], dtype=torch.float64)
        share, relative, absolute, most = limits.repeat_interleave(counts, dim=0).to(found.device).unbind(1)
        is_near = (found - totals * share).abs() <= (relative + _FP64) * magnitudes * share + absolute
        # above, a partial sum may have overflowed, which is no error; what is infinite already is verified elsewhere
        self._wrong = ~is_near & (magnitudes < most)
        rows = self._wrong.long()[:, None].expand(-1, 2)
        self._findings.hint(torch.zeros_like(rows), rows)

    def settle(self) -> None:
        """Note the mismatches that ``compare`` has found in results that should be equal and in sums. A member whose
        result differs from that of the majority notes a REDUCTION mismatch; if there is no majority, all members note a
        DISPUTED mismatch. Collective if members have different results. Synchronises with the device."""
        rows = self._differs.nonzero().flatten()
        if len(rows):
            all_ranks = self._gathered(self._equal.table()[rows].contiguous())
            judged = verdicts(self._rank, [each.tolist() for each in all_ranks])
            for row, how in zip(rows.tolist(), judged, strict=True):
                if how is not None:
                    self._findings.note(Mismatch(self._places[row], how))
        wrong, first = [] if self._wrong is None else self._wrong.tolist(), 0
        for one in self._sums if wrong else ():
            bad, count = sum(wrong[first : first + len(one.result)]), len(one.result)
            if bad:
                self._findings.note(Mismatch(one.at, SUM, note=f"{bad} of {count} blocks"))
            first += count


def digests(findings: Findings, tensor: torch.Tensor, splits: Sequence[int]) -> torch.Tensor:
    """Return the digests of the pieces of ``tensor`` along its first dimension, int64 [pieces, 2]."""
    rows = findings.rows()
    for piece in tensor.detach().split(list(splits)):
        rows.add(piece)
    return rows.table()


class Collectives:
    """The collectives of one rank in one iteration.

    Args:
        findings: where mismatches are noted.
        falsify: corrupts the result of an all-reduce in fault-injection experiments; None: nothing does.
    """

    def __init__(self, findings: Findings, falsify: Callable[[torch.Tensor], None] | None = None):
        self._findings, self._falsify = findings, falsify
        self.restart()

    def restart(self) -> None:
        """Begin an iteration."""
        self._open: list[Begun] = []
        self._groups: dict[str, _Group] = {}

    def begin(
        self,
        kind: str,
        group: dist.ProcessGroup,
        outputs: Sequence[torch.Tensor],
        source: torch.Tensor,
        at: OperatorCall,
        *,
        op: Any = None,
        splits: tuple[Sequence[int], Sequence[int]] = ((), ()),
        is_coalesced: bool = False,
    ) -> Begun:
        """Note a collective that is about to begin; the arguments are those of :class:`Begun`, and these:

        Args:
            op: operation of a reduction.
            splits: sizes of the pieces of the output and of ``source`` along the first dimension, of an all-to-all.
            is_coalesced: whether it begins later, together with others: ``end_in`` reports its end, otherwise ``end``.
        """
        begun = Begun(kind, group, outputs, source, at)
        is_reduction = kind in (ALL_REDUCE, REDUCE_SCATTER)
        if is_reduction and op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG) and source.is_floating_point():
            begun.is_mean = op == dist.ReduceOp.AVG
            if source.numel():
                begun.part = block_sums(source, 1 if kind == ALL_REDUCE else dist.get_world_size(group))
        elif kind == ALL_TO_ALL:
            begun.sent, begun.splits = digests(self._findings, source, splits[1]), splits[0]
        if is_coalesced:
            self._open.append(begun)
        return begun

    def end(self, begun: Begun) -> None:
        """Read the result of a collective that is complete."""
        if begun.kind == ALL_REDUCE and self._falsify is not None:
            self._falsify(begun.outputs[0])
        name = begun.group.group_name
        if name not in self._groups:
            self._groups[name] = _Group(self._findings, begun.group)
        self._groups[name].ended(begun)

    def end_in(self, tensors: Iterable[torch.Tensor]) -> None:
        """Read the results of all collectives that write into the memory of ``tensors``, and that are complete."""
        storages = {tensor.untyped_storage()._cdata for tensor in tensors}
        for begun in list(self._open):
            if begun.outputs[0].untyped_storage()._cdata in storages:
                self._open.remove(begun)
                self.end(begun)

    def finish(self) -> None:
        """Read the results of all-reduces whose end was not reported. They must be complete now, and all members have
        changed them alike since, so that only their equality is verified."""
        for begun in list(self._open):
            if begun.kind == ALL_REDUCE:
                self._open.remove(begun)
                begun.part = None
                self.end(begun)

    def compare(self) -> None:
        """Compare what was recorded with the other ranks' records, for the flag of ``Findings``. All ranks have to call
        it; groups are sorted by name so that all ranks have the same order."""
        self.finish()
        self._findings.unverified += len(self._open)
        for name in sorted(self._groups):
            self._groups[name].compare()

    def settle(self) -> None:
        """Note the mismatches that ``compare`` has found in all-reduces, reduce-scatters and all-gathers. Collective in
        groups whose members have different results. Synchronises with the device."""
        for name in sorted(self._groups):
            self._groups[name].settle()


SENT_FORWARD, RECEIVED_FORWARD, SENT_BACKWARD, RECEIVED_BACKWARD = range(4)
"""Kinds of messages: activations, and gradients."""


class Messages:
    """Digests of the messages of one rank in one iteration.

    Args:
        findings: where mismatches are noted.
        group: process group of the pipeline; a member's rank in it is its stage.
        chunks: number of model chunks of a rank.
    """

    def __init__(self, findings: Findings, group: dist.ProcessGroup, chunks: int):
        self._findings, self._group, self._chunks = findings, group, chunks
        self.stage, self._stages = dist.get_rank(group), dist.get_world_size(group)
        self._write = writer(findings.device)
        self.restart(1)

    def restart(self, microbatches: int) -> None:
        """Begin an iteration with ``microbatches`` microbatches."""
        size = (4, self._chunks, max(microbatches, 1), 2)
        self._table = torch.zeros(size, dtype=torch.int64, device=self._findings.device)
        self._ways: Sequence[Sequence[int]] = ()

    def follow(self, ways: Sequence[Sequence[int]]) -> None:
        """Note the routes of the microbatches in this iteration, where stages have one model chunk each.

        Args:
            ways: for each microbatch, the stages in the order in which it passes them.
        """
        self._ways = ways

    def record(self, kind: int, chunk: int, microbatch: int, tensors: Sequence[torch.Tensor]) -> None:
        """Record what a chunk has received or sends for a microbatch, whose tensors get one digest together.

        Args:
            kind: SENT_FORWARD, RECEIVED_FORWARD, SENT_BACKWARD or RECEIVED_BACKWARD.
            chunk: number of the model chunk on this rank.
            microbatch: number of the microbatch; one beyond those announced to :meth:`restart` is left out.
            tensors: the tensors of the message.
        """
        if self._stages == 1 or microbatch >= self._table.shape[2]:
            return
        row = self._table[kind, chunk, microbatch]
        for number, tensor in enumerate(tensors):
            one = row if not number else torch.empty_like(row)
            self._write(tensor.detach(), self._findings.seed, one)
            if number:
                row.mul_(3).add_(one)  # not a plain sum, which would be the same for exchanged tensors

    def compare(self) -> None:
        """Compare the messages that this rank received with those that were sent. All ranks of the pipeline call it."""
        if self._stages == 1:
            return
        tables = [torch.empty_like(self._table) for _ in range(self._stages)]
        dist.all_gather(tables, self._table, group=self._group)
        for chunk in range(self._chunks):
            for microbatches, before, after in self._neighbours(chunk):
                self._compare_with(tables, before, chunk, microbatches, FORWARD)
                self._compare_with(tables, after, chunk, microbatches, BACKWARD)

    def _neighbours(self, chunk: int) -> Iterator[tuple[list[int], int, int]]:
        """Yield (microbatches, global stage before, global stage after) of a chunk; -1: there is none."""
        count, stages = self._table.shape[2], self._stages * self._chunks
        if not self._ways:
            here = self.stage + self._stages * chunk
            yield list(range(count)), here - 1, here + 1 if here + 1 < stages else -1
            return
        found: dict[tuple[int, int], list[int]] = {}
        for number, way in enumerate(self._ways[:count]):
            at = list(way).index(self.stage)
            around = (way[at - 1] if at else -1, way[at + 1] if at + 1 < len(way) else -1)
            found.setdefault(around, []).append(number)
        for (before, after), microbatches in found.items():
            yield microbatches, before, after

    def _compare_with(
        self, tables: list[torch.Tensor], sender: int, chunk: int, microbatches: list[int], phase: str
    ) -> None:
        """Compare the messages that ``chunk`` received for ``microbatches`` from global stage ``sender`` in ``phase``;
        nothing beyond the ends of the pipeline, where there is no sender (-1)."""
        if sender < 0:
            return
        if phase == FORWARD:
            name, sent, received = "recv_forward", SENT_FORWARD, RECEIVED_FORWARD
        else:
            name, sent, received = "recv_backward", SENT_BACKWARD, RECEIVED_BACKWARD
        expected = tables[sender % self._stages][sent, sender // self._stages][microbatches]
        found = self._table[received, chunk][microbatches]
        places = [(OperatorCall(name, phase, chunk, number, NO_LAYER, 0), MESSAGE) for number in microbatches]
        self._findings.tables(places, expected, found)
