"""Verify the activations and gradients that pipeline stages exchange: compare what arrived with what was sent.

DMR (dual modular redundancy, SpareTrain) finds computation errors by executing operators twice; this module finds
transfer errors by *digests*, 128-bit hashes of a tensor's bits. A stage computes the digest of what it receives and of
what it sends. All digests of an iteration are exchanged together at its end, because an additional message for each
digest would cost more than computing it. With P stages, model chunk c of stage s is number c * P + s in the order in
which a microbatch passes through the chunks (its global stage). In CheckFree+ microbatches have other orders (routes).
"""

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from ft.systems.dmr.digest import writer
from ft.systems.dmr.plan.trace import BACKWARD, FORWARD
from ft.systems.dmr.runtime.cursor import NO_LAYER, OperatorCall
from ft.systems.dmr.runtime.findings import MESSAGE, Findings

_SENT_FORWARD, _RECEIVED_FORWARD, _SENT_BACKWARD, _RECEIVED_BACKWARD = range(4)


class Messages:
    """Digests of the messages of one rank in one iteration.

    Args:
        findings: receives the mismatches.
        group: process group of the pipeline.
        chunks: number of model chunks of a rank.

    Attributes:
        stage: pipeline stage of this rank.
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

    def forward_begins(self, chunk: int, microbatch: int, tensors: Sequence[torch.Tensor]) -> None:
        """Record the activations that a chunk has received for a microbatch."""
        self._put(_RECEIVED_FORWARD, chunk, microbatch, tensors)

    def forward_ends(self, chunk: int, microbatch: int, tensors: Sequence[torch.Tensor]) -> None:
        """Record the activations that a chunk sends for a microbatch."""
        self._put(_SENT_FORWARD, chunk, microbatch, tensors)

    def backward_begins(self, chunk: int, microbatch: int, tensors: Sequence[torch.Tensor]) -> None:
        """Record the gradients that a chunk has received for a microbatch."""
        self._put(_RECEIVED_BACKWARD, chunk, microbatch, tensors)

    def backward_ends(self, chunk: int, microbatch: int, tensors: Sequence[torch.Tensor]) -> None:
        """Record the gradients that a chunk sends for a microbatch."""
        self._put(_SENT_BACKWARD, chunk, microbatch, tensors)

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
        """Compare the messages that ``chunk`` received for ``microbatches`` from global stage ``sender`` in ``phase``.

        Beyond the ends of the pipeline there is no sender (-1), and nothing is compared.
        """
        if sender < 0:
            return
        if phase == FORWARD:
            name, sent, received = "recv_forward", _SENT_FORWARD, _RECEIVED_FORWARD
        else:
            name, sent, received = "recv_backward", _SENT_BACKWARD, _RECEIVED_BACKWARD
        expected = tables[sender % self._stages][sent, sender // self._stages][microbatches]
        found = self._table[received, chunk][microbatches]
        places = [(OperatorCall(name, phase, chunk, number, NO_LAYER, 0), MESSAGE) for number in microbatches]
        self._findings.tables(places, expected, found)

    def _put(self, kind: int, chunk: int, microbatch: int, tensors: Sequence[torch.Tensor]) -> None:
        """Store the digest of a message. The digests of several tensors of one message are combined into one."""
        if self._stages == 1 or microbatch >= self._table.shape[2]:
            return
        row = self._table[kind, chunk, microbatch]
        for number, tensor in enumerate(tensors):
            one = row if not number else torch.empty_like(row)
            self._write(tensor.detach(), self._findings.seed, one)
            if number:
                row.mul_(3).add_(one)  # not a plain sum, which would be the same for exchanged tensors
