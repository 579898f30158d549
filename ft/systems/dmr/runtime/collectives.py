"""Verify the results of collectives: each rank must receive what the others sent, even if the library computes wrongly.

DMR (dual modular redundancy, SpareTrain) executes operators twice, which is impossible for a collective of one rank
alone. Instead:

- all-reduce: all members have the same result (:mod:`reductions`), and it is the sum of their parts (:mod:`sums`).
- reduce-scatter: each piece is the sum of the parts (:mod:`sums`).
- all-gather: all members have the same result, and each one's own piece is what it has put in.
- all-to-all: the digest of each piece is the one that its sender has computed.

Only digests and sums of blocks are exchanged, once at the end of an iteration.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ft.systems.dmr.runtime.cursor import OperatorCall
from ft.systems.dmr.runtime.findings import MESSAGE, Findings
from ft.systems.dmr.runtime.reductions import Reductions
from ft.systems.dmr.runtime.sums import Sums, block_sums

ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER, ALL_TO_ALL = "all_reduce", "reduce_scatter", "all_gather", "all_to_all"


@dataclass(eq=False)
class Begun:
    """A collective that has begun.

    Attributes:
        kind: ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER or ALL_TO_ALL.
        group: its process group.
        outputs: the tensors that receive the result, a rank's piece after the other's.
        source: what this rank puts in.
        at: place in the iteration.
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


class Collectives:
    """The collectives of one rank in one iteration.

    Args:
        findings: receives the mismatches.
        falsify: corrupts the result of an all-reduce in fault-injection experiments; None otherwise.
    """

    def __init__(self, findings: Findings, falsify: Callable[[torch.Tensor], None] | None = None):
        self._findings, self._falsify = findings, falsify
        self._equal = Reductions(findings)
        self.restart()

    def restart(self) -> None:
        """Begin an iteration."""
        self._equal.restart()
        self._open: list[Begun] = []
        self._sums: dict[str, Sums] = {}
        self._pieces: dict[
            str, tuple[dist.ProcessGroup, list[OperatorCall], list[torch.Tensor], list[torch.Tensor]]
        ] = {}

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
        """Note a collective that is about to begin.

        Args:
            kind: as in :class:`Begun`, like the next four.
            group: the process group.
            outputs: the tensors that receive the result.
            source: what this rank puts in.
            at: place in the iteration.
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
            begun.sent, begun.splits = self._digests(source, splits[1]), splits[0]
        if is_coalesced:
            self._open.append(begun)
        return begun

    def end(self, begun: Begun) -> None:
        """Read the result of a collective that is complete."""
        if begun.kind == ALL_REDUCE and self._falsify is not None:
            self._falsify(begun.outputs[0])
        if begun.kind in (ALL_REDUCE, ALL_GATHER):
            for output in begun.outputs:
                self._equal.done(begun.group, output, begun.at)
        if begun.part is not None:
            name = begun.group.group_name
            if name not in self._sums:
                self._sums[name] = Sums(self._findings, begun.group)
            self._sums[name].add(begun.part, begun.outputs[0], begun.at, is_mean=begun.is_mean)
        elif begun.kind == ALL_GATHER:
            self._compare_own(begun)
        elif begun.kind == ALL_TO_ALL:
            _, places, sent, received = self._pieces.setdefault(begun.group.group_name, (begun.group, [], [], []))
            places.append(begun.at)
            sent.append(begun.sent)
            received.append(self._digests(begun.outputs[0], begun.splits))

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
        self._equal.compare()
        for name in sorted(self._sums):
            self._sums[name].compare()
        for name in sorted(self._pieces):
            group, places, sent, received = self._pieces[name]
            mine = torch.stack(sent)
            everybody = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
            dist.all_gather(everybody, mine, group=group)
            expected = torch.stack(everybody, dim=1)[:, :, dist.get_rank(group)]
            rows = [(at, MESSAGE) for at in places for _ in everybody]
            self._findings.tables(rows, expected.flatten(0, 1), torch.stack(received).flatten(0, 1))

    def settle(self) -> None:
        """Note the mismatches that ``compare`` has found in all-reduces, reduce-scatters and all-gathers. Collective in
        groups whose members have different results. Synchronises with the device."""
        self._equal.settle()
        for name in sorted(self._sums):
            self._sums[name].settle()

    def _compare_own(self, begun: Begun) -> None:
        """Compare this rank's own piece of an all-gather with what it has put in, unless both are the same memory."""
        rank, size = dist.get_rank(begun.group), dist.get_world_size(begun.group)
        own = begun.outputs[rank] if len(begun.outputs) > 1 else begun.outputs[0].reshape(size, -1)[rank]
        if own.untyped_storage()._cdata != begun.source.untyped_storage()._cdata:
            self._findings.pair(begun.at, MESSAGE, [own.reshape(-1)], [begun.source.detach().reshape(-1)])

    def _digests(self, tensor: torch.Tensor, splits: Sequence[int]) -> torch.Tensor:
        """Return the digests of the pieces of ``tensor`` along its first dimension, int64 [pieces, 2]."""
        rows = self._findings.rows()
        for piece in tensor.detach().split(list(splits)):
            rows.add(piece)
        return rows.table()
