"""Hooks in megatron-core's gradient reduction that add the all-reduce between FT-HSDP replicas.

An FT-HSDP replica is a full copy of the model whose ranks form a world of their own. A bucket group is megatron-core's
unit of gradient reduction. Core calls ``start_grad_sync`` when a bucket group's gradients are complete, and
``finish_grad_sync`` when they are needed. Both still reduce the gradients inside the replica, and then call an
``ft.systems.hsdp.exchange.Exchange``, which reduces them between replicas. Bucket groups without one behave as before.
"""

import threading
from collections.abc import Iterable
from typing import Any

import torch

from megatron.core.distributed import param_and_grad_buffer as core
from megatron.patches.manifest import Patch
from megatron.patches.step_state import bucket_groups

_ATTRIBUTE = "exchange_with_replicas"


def exchange_through(chunks: Iterable, exchange: Any) -> None:
    """Exchange the gradients of all bucket groups of ``chunks`` (DistributedDataParallel) from now on."""
    for group in groups_of(chunks):
        setattr(group, _ATTRIBUTE, exchange)


def groups_of(chunks: Iterable) -> list:
    """Return all bucket groups in the order in which all replicas exchange them, which is that of a backward pass."""
    return [group for chunk in reversed(list(chunks)) for group in bucket_groups(chunk)]


def _start_grad_sync(start, self, force_all_reduce=False):
    is_under_way = self.grad_reduce_handle is not None
    start(self, force_all_reduce=force_all_reduce)
    exchange = getattr(self, _ATTRIBUTE, None)
    if exchange is None or (self.is_first_batch and is_under_way):
        return
    parts = _parts(self, force_all_reduce)
    device = parts[0].device if parts and parts[0].device.type == "cuda" else None
    reduction = None
    if self.grad_reduce_handle is not None:
        reduction = self.grad_reduce_handle = _Reduction(self.grad_reduce_handle, device)
    elif device is not None:
        reduction = _QueuedReduction(device, getattr(self, "communication_stream", None))
    exchange.started(self, parts, None if reduction is None else reduction.wait)


def _finish_grad_sync(finish, self, force_all_reduce=False):
    finish(self, force_all_reduce=force_all_reduce)
    exchange = getattr(self, _ATTRIBUTE, None)
    if exchange is not None:
        exchange.finished(self)


class _Reduction:
    """Thread-safe handle of a reduction inside the replica: the exchange's thread and core's thread wait for it.

    The first wait is that of core's handle, which may also compute (gloo's reduce-scatter, and reduce-scatters that add
    in fp32), so it is called once. On a device, it makes only the stream wait that is current in the calling thread:
    the current streams of later calls wait for an event behind that. The handle is kept until core drops this one,
    because the memory of its tensors may be used again from then on.

    Args:
        handle: core's handle.
        device: CUDA device of the gradients; None: they are in host memory.
    """

    def __init__(self, handle: Any, device: torch.device | None):
        self._handle, self._device, self._lock = handle, device, threading.Lock()
        self._is_waited, self._waited = False, None

    def wait(self) -> None:
        with self._lock:
            if self._is_waited:
                if self._waited is not None:
                    torch.cuda.current_stream(self._device).wait_event(self._waited)
                return
            self._handle.wait()
            self._is_waited = True
            if self._device is not None:
                self._waited = torch.cuda.current_stream(self._device).record_event()


class _QueuedReduction:
    """A reduction inside the replica for which core has no handle: it was queued on streams of the device.

    Core reduces on the current stream, or, with several instances of the distributed optimizer, on a communication
    stream of its own.

    Args:
        device: CUDA device of the gradients.
        stream: core's communication stream, or None.
    """

    def __init__(self, device: torch.device, stream: Any):
        self._device = device
        streams = [torch.cuda.current_stream(device), *([] if stream is None else [stream])]
        self._events = [each.record_event() for each in streams]

    def wait(self) -> None:
        for event in self._events:
            torch.cuda.current_stream(self._device).wait_event(event)


def _parts(group, whole: bool) -> list[torch.Tensor]:
    """Return the gradients that this rank exchanges: its shards of the buckets, or whole buckets without sharding."""
    if whole or not group.ddp_config.use_distributed_optimizer:
        return [bucket.grad_data for bucket in group.buckets]
    ranks, rank = group.intra_distributed_optimizer_instance_size, group.intra_distributed_optimizer_instance_rank
    return [core.shard_buffer(bucket.grad_data, ranks)[rank] for bucket in group.buckets]


_SIGNATURES = ("(self, force_all_reduce=False)",)
PATCHES = (
    Patch(
        core.__name__,
        "_ParamAndGradBucketGroup.start_grad_sync",
        "gradients that are reduced inside a replica are then exchanged with the other replicas (FT-HSDP)",
        _start_grad_sync,
        _SIGNATURES,
    ),
    Patch(
        core.__name__,
        "_ParamAndGradBucketGroup.finish_grad_sync",
        "core waits for the gradients of the other replicas before it uses the gradients (FT-HSDP)",
        _finish_grad_sync,
        _SIGNATURES,
    ),
)
