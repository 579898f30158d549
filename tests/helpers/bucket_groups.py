"""megatron-core's bucket groups on the model of CUDA.

Core's own code starts and finishes their reductions, on a model of NCCL, and a ring's driver does its all-reduces at
moments that a seed draws.
"""

import contextlib
from collections import deque
from types import SimpleNamespace

import torch
from cuda_model import Cuda, DeviceTensor, NcclWork, Stream
from ring_neighbours import Neighbours, Poller

from ft.systems.hsdp.ring import Ring, RingOptions
from ft.systems.hsdp.ring.flow import Reducer
from ft.systems.hsdp.ring.options import Pending, ReduceResult
from ft.systems.hsdp.ring.ring import Members, RingOperation
from megatron.core.distributed import param_and_grad_buffer as core

RANKS, RANK = 2, 1
"""Ranks that share the optimizer's state inside a replica, and this one."""


class Nccl:
    """The collectives inside a replica: the reduction of a tensor adds what the other ranks have for it.

    Attributes:
        others: address of a tensor -> the sum of the other ranks, on the device.
    """

    def __init__(self, cuda: Cuda):
        self._cuda, self.inside = cuda, Stream(cuda.device)
        self.others: dict[int, torch.Tensor] = {}
        self._scratch = {}
        self._manager = None

    @contextlib.contextmanager
    def coalescing(self, group, async_ops=False, **kwargs):
        self._manager = manager = SimpleNamespace(works=[])
        manager.wait = lambda: [work.wait() for work in manager.works]
        yield manager
        if not async_ops:
            manager.wait()
            manager.works.clear()

    def reduce_scatter(self, output, given, op=None, group=None, async_op=False):
        scratch = self._scratch.setdefault(given.data_ptr(), self._cuda.tensor(torch.zeros(given.shape)))

        def run() -> None:
            scratch.copy_(given)
            output.add_(self.others[output.data_ptr()])

        return self._start(run)

    def all_reduce(self, tensor, op=None, group=None, async_op=False):
        return self._start(lambda: tensor.mul_(1.0))  # the other instances have zeros

    def _start(self, run):
        work = NcclWork(self._cuda, self.inside, run)
        self._manager.works.append(work)
        return work


def group_of(cuda: Cuda, nccl: Nccl, sizes: list[int], *, overlap: bool, instances: int):
    """Return a bucket group with buckets of these sizes."""
    group = core._ParamAndGradBucketGroup.__new__(core._ParamAndGradBucketGroup)
    config = {"check_for_nan_in_grad": False, "check_for_large_grads": False, "average_in_collective": False}
    config |= {"overlap_grad_reduce": overlap, "num_distributed_optimizer_instances": instances}
    config |= {"use_distributed_optimizer": True, "reduce_scatter_with_fp32_accumulation": False}
    group.ddp_config = SimpleNamespace(**config)
    group.is_first_batch, group.grad_reduce_handle, group.grad_reduce_finished = False, None, False
    group.previous_grad_reduce_bucket_group = None
    group.buckets = [bucket_of(cuda.tensor(torch.zeros(size))) for size in sizes]
    group.intra_distributed_optimizer_instance_group = group.data_parallel_group = "inside"
    group.intra_distributed_optimizer_instance_size, group.intra_distributed_optimizer_instance_rank = RANKS, RANK
    group.inter_distributed_optimizer_instance_group = "instances"
    group.cached_grad_buffer_shard_list = [None] * len(sizes)
    group.communication_stream = Stream(cuda.device) if instances > 1 else None
    for bucket in group.buckets:
        shard = shard_of(bucket)
        nccl.others[shard.data_ptr()] = cuda.tensor(torch.zeros(shard.shape))
    return group


def bucket_of(grads: DeviceTensor) -> SimpleNamespace:
    return SimpleNamespace(
        grad_data=grads, gradient_scaling_factor=1.0, params_list=[], params_with_extra_main_grads=[]
    )


def shard_of(bucket: SimpleNamespace) -> torch.Tensor:
    """Return this rank's shard of a bucket's gradients."""
    return core.shard_buffer(bucket.grad_data, RANKS)[RANK]


class LateRing(Ring):
    """A ring of two members, whose thread runs when :meth:`go_on` is called.

    Attributes:
        mine: address of a tensor -> its values in this replica when it is exchanged.
        theirs: address of a tensor -> its values in the other replica.
        breaks: whether the ring breaks in the next all-reduce.
    """

    def __init__(self, cuda: Cuda):
        self._cuda, self._poller, self._options = cuda, Poller(cuda), RingOptions(64, 2)
        self._reducer = Reducer(self._poller, self._options, cuda.breathe, lambda: None)
        self._door = SimpleNamespace(tend=lambda: None, give_up=lambda *_: None)
        self.mine: dict[int, torch.Tensor] = {}
        self.theirs: dict[int, torch.Tensor] = {}
        self.breaks = False
        self._operations: deque[RingOperation] = deque()
        self.reconnect()

    def reconnect(self) -> None:
        self._members, self._links, self._broken = Members(1, ["a", "b"], 0), None, None
        self._order, self._cancelled, self._is_closing, self.breaks = 1, 0, False, False

    @property
    def is_idle(self) -> bool:
        return not self._operations

    def _submit(self, job: RingOperation) -> None:
        job.pending = _Late(self)
        self._operations.append(job)

    def cancel(self, reason: str) -> None:
        self._cancelled, self._why_cancelled = self._order, reason

    def go_on(self) -> None:
        """Let the ring's thread do one operation."""
        if self._operations:
            with self._cuda.thread():
                self._do(self._operations.popleft())

    def _reduce(self, tensor: torch.Tensor, scale: float) -> None:
        if isinstance(tensor, DeviceTensor):
            values = [self.mine[tensor.data_ptr()], self.theirs[tensor.data_ptr()]]
            ring = Neighbours(self._cuda, values, 0, self._options, scale)
            if self.breaks:
                ring.breaks_after = self._cuda.random.randrange(len(ring.plan))
            self._reducer.reduce(tensor, scale, ring, 0, 2)


class _Late(Pending):
    """Whoever waits for the end of the operation lets the ring's thread run."""

    def __init__(self, ring: LateRing):
        super().__init__()
        self._ring = ring

    def wait(self) -> ReduceResult:
        while not self.done():
            self._ring.go_on()
        return super().wait()
