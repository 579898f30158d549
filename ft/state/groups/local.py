"""Process-group operations that complete locally, without communication.

They are used in groups of one member, and in all groups of a worker that joins a running job as a replacement. Such a
worker builds its model, optimizer and data sets while the other workers wait, so its collectives would find no peers.
It only has to start up, because its state is restored from other ranks afterwards. Each operation completes at once:

- a broadcast, a send, a receive and a barrier change nothing (a receive buffer keeps its content);
- an all-gather and a gather repeat this member's own part for each member;
- a reduction returns this member's own input: a minimum, maximum or average of equal values is that value, and a sum is
  **not** multiplied by the number of members; a reduce-scatter returns this member's part of its own input;
- a scatter copies the source's own part to its output, and changes nothing on other members;
- an all-to-all fills every part of the output with the part that this member sends to itself, where the sizes agree.

For a group of one member, all these results are exact.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


class Ended(dist.Work):
    """The ``dist.Work`` of a completed operation. ``source``: group rank of a received message's sender."""

    def __init__(self, source: int = 0):
        super().__init__()
        self._source = source

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def exception(self) -> None:
        return None

    def synchronize(self) -> None:
        return None

    def result(self) -> list[torch.Tensor]:
        return []

    def source_rank(self) -> int:
        return self._source

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        future = torch.futures.Future[list[torch.Tensor]]()
        future.set_result([])
        return future


class Local:
    """The operations of ``dist.ProcessGroup``, completed locally.

    Args:
        rank: group rank of this member.
        size: number of members.
    """

    def __init__(self, rank: int, size: int):
        self._rank, self._size = rank, size
        self._ended = Ended((rank + 1) % size)

    def _nothing(self, *_args: Any, **_kwargs: Any) -> dist.Work:
        return self._ended

    broadcast = send = recv = recv_anysource = barrier = monitored_barrier = _nothing

    def allreduce(self, tensors: Any, opts: Any = None, *_args: Any, **_kwargs: Any) -> dist.Work:
        operation = getattr(opts, "reduceOp", opts)
        if operation is not None and operation == dist.ReduceOp.PREMUL_SUM:
            raise RuntimeError("a premultiplied sum needs NCCL, and a group of one member makes no NCCL communicator")
        return self._ended

    allreduce_coalesced = reduce = allreduce

    def allgather(self, outputs: Any, inputs: Any, *_args: Any, **_kwargs: Any) -> dist.Work:
        if isinstance(inputs, torch.Tensor):
            outputs, inputs = [outputs], [inputs]
        for gathered, own in zip(outputs, inputs, strict=True):
            _repeat(gathered, own)
        return self._ended

    allgather_coalesced = allgather

    def all_gather_single(self, output: torch.Tensor, own: torch.Tensor, *_args: Any, **_kwargs: Any) -> dist.Work:
        _repeat(output.view(-1).chunk(self._size), own)
        return self._ended

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, *_args: Any, **_kwargs: Any) -> dist.Work:
        for output, own in zip(outputs, inputs, strict=True):
            self.all_gather_single(output, own)
        return self._ended

    def reduce_scatter(self, outputs: Any, inputs: Any, *_args: Any, **_kwargs: Any) -> dist.Work:
        if isinstance(outputs, torch.Tensor):
            outputs, inputs = [outputs], [inputs]
        for output, parts in zip(outputs, inputs, strict=True):
            _copy(output, parts[self._rank])
        return self._ended

    def reduce_scatter_single(
        self, output: torch.Tensor, whole: torch.Tensor, *_args: Any, **_kwargs: Any
    ) -> dist.Work:
        _copy(output, whole.reshape(-1).chunk(self._size)[self._rank])
        return self._ended

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, *_args: Any, **_kwargs: Any) -> dist.Work:
        for output, whole in zip(outputs, inputs, strict=True):
            self.reduce_scatter_single(output, whole)
        return self._ended

    def gather(self, outputs: Any, inputs: Any, *_args: Any, **_kwargs: Any) -> dist.Work:
        if outputs:
            self.allgather(outputs, inputs)
        return self._ended

    def scatter(self, outputs: Any, inputs: Any, *_args: Any, **_kwargs: Any) -> dist.Work:
        if inputs:
            self.reduce_scatter(outputs, inputs)
        return self._ended

    def alltoall(self, outputs: Any, inputs: Any, *_args: Any, **_kwargs: Any) -> dist.Work:
        _repeat(outputs, inputs[self._rank])
        return self._ended

    def all_to_all_single(
        self,
        output: torch.Tensor,
        whole: torch.Tensor,
        output_sizes: Sequence[int] = (),
        input_sizes: Sequence[int] = (),
        *_args: Any,
        **_kwargs: Any,
    ) -> dist.Work:
        parts = whole.split(list(input_sizes)) if input_sizes else whole.chunk(self._size)
        gathered = output.split(list(output_sizes)) if output_sizes else output.chunk(self._size)
        _repeat(gathered, parts[self._rank])
        return self._ended

    # The names before torch 2.13.
    _allgather_base, allgather_into_tensor_coalesced = all_gather_single, all_gather_single_coalesced
    _reduce_scatter_base, reduce_scatter_tensor_coalesced = reduce_scatter_single, reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    def _start_coalescing(self, device: torch.device) -> None:
        return None

    def _end_coalescing(self, device: torch.device) -> dist.Work:
        return self._ended


def _repeat(outputs: Sequence[torch.Tensor], own: torch.Tensor) -> None:
    own = own.clone() if len(outputs) > 1 else own  # the input may share memory with a part of the outputs
    for output in outputs:
        _copy(output, own)


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    if target.numel() == source.numel() and target.data_ptr() != source.data_ptr():
        target.detach().copy_(source.detach().reshape(target.shape))
