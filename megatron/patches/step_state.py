"""Writes the state of a training step in megatron-core's (core's) objects.

A recovery resets what an aborted step has left behind. Schedules in which a microbatch does not use all parameters
choose the microbatch at which the reduction of each gradient bucket starts: core has one last microbatch for all
parameters, and a bucket group with ``is_last_microbatch`` counts the gradients of its parameters in that microbatch's
backward, and starts its reduction when all of them are complete. In such schedules each bucket group has its own last
microbatch, and some of its parameters may be complete before.

This module replaces no symbol. It is the one place that knows the attributes of core's objects that these two have to
write. If the installed core lacks one of them, a UserError names the attribute.
"""

import sys
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from ft.base.errors import UserError
from megatron import core
from megatron.core import parallel_state
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.transformer.moe.moe_utils import clear_aux_losses_tracker
from megatron.patches.releases import clear_cached_collective_results

_OF_CHUNKS = (
    *("module", "config", "bucket_groups", "expert_parallel_bucket_groups"),
    *("zero_grad_buffer", "start_param_sync"),
)
"""Attributes of a model chunk that the functions of this module use."""


def lacking(chunk) -> list[str]:
    """Return the names of what a model chunk lacks, so that a recovery could not reset it."""
    if is_fsdp2(chunk):  # torch has it from 2.13 on
        return [] if hasattr(chunk.module, "reset_iter_state") else ["module.reset_iter_state"]
    return [name for name in _OF_CHUNKS if not hasattr(chunk, name)]


def is_fsdp2(chunk) -> bool:
    """Return whether a model chunk is sharded by torch's FSDP2 (--use-torch-fsdp2)."""
    return type(chunk).__name__ == "TorchFullyShardedDataParallel"


def abandon_step(chunks: Iterable, optimizer) -> None:
    """Reset ``chunks`` (DistributedDataParallel) and ``optimizer`` to their state before a first step.

    Runs no collective. Drops the handles of operations that will never end, and all gradients. Bucket groups count the
    gradients of a backward pass anew, as in a first step: a worker that has just joined has to, and all members of a
    process group must reduce in the same order.
    """
    for chunk in chunks:
        if is_fsdp2(chunk):  # the whole weights that it has gathered keep gradients, too, which torch does not discard
            chunk.module.zero_grad()
            chunk.module.reset_iter_state()
        for group in bucket_groups(chunk):
            set_known(group, grad_reduce_handle=None, param_gather_handle=None, param_gather_dispatched=False)
            set_known(group, is_first_batch=True, is_last_microbatch=True)
            set_known(group, golden_per_param_grad_ready_counts={}, per_param_grad_ready_counts={})
        for module in chunk.modules():
            if hasattr(module, "cached_fc1_input"):  # shared experts that compute beside the dispatch of tokens
                set_known(module, cached_fc1_input=None, cached_fc2_input=None, cached_fc2_output=None)
                set_known(module, cached_output=None, gate_score=None)
                if hasattr(module, "_overlap_state"):  # newer releases of core expect the parts in their order
                    module._overlap_state = type(module._overlap_state).IDLE
            if getattr(module, "grad_output_buffer", None):  # core empties the list beside it when a step begins
                module.grad_output_buffer.clear()
        chunk.zero_grad_buffer()  # last: core would take the counts of a first batch for complete
        chunk.module.zero_grad()
    optimizer.zero_grad()
    clear_cached_collective_results(optimizer)
    clear_losses()
    timers = chunks[0].config.timers if chunks else None
    if timers is not None:
        for timer in timers._timers.values():
            timer._started = False
            timer.reset()


_TRACKERS = {
    "megatron.core.transformer.multi_token_prediction": "MTPLossLoggingHelper",
    "megatron.core.transformer.experimental_attention_variant.dsa": "DSAIndexerLossLoggingHelper",
}
_SUMS = ("values", "loss_values", "correct_values", "total_values")


def clear_losses() -> None:
    """Reset the losses that core sums up for the log during a step.

    They are those of MoE routers, of multi-token prediction, and of the indexers of sparse attention.
    """
    clear_aux_losses_tracker()
    for name, helper in _TRACKERS.items():
        tracker = getattr(getattr(sys.modules.get(name), helper, None), "tracker", {})
        for sums in _SUMS:
            if sums in tracker:
                tracker[sums].zero_()
        for group in {"reduce_group", "avg_group"} & tracker.keys():
            tracker[group] = None  # core reduces over it where a step has set it, and a new worker has none


def expect_no_backward(chunks: Iterable) -> None:
    """Prepare ``chunks`` for a gradient synchronisation that no backward pass has started.

    ``finish_grad_sync`` then starts the reduction itself, as in a first batch. Call it on all ranks of a model.
    """
    for chunk in chunks:
        for group in bucket_groups(chunk):
            set_known(group, is_first_batch=True, golden_per_param_grad_ready_counts={})


def hold_back(group: Any) -> None:
    """Make the bucket group ``group`` ignore the gradients of the next backward passes."""
    set_known(group, is_last_microbatch=False)


def start_when_ready(group: Any, complete: Iterable[torch.nn.Parameter]) -> None:
    """Make ``group`` start its reduction in the next backward pass, when its last gradient is complete.

    As in core, the reduction starts after the backward passes if this is the first batch of the group.

    Args:
        group: a bucket group of core.
        complete: those of its parameters that the next backward pass does not use; at least one other is used. Each
            is counted once, as a parameter is that one backward pass uses once.
    """
    set_known(group, is_last_microbatch=True, per_param_grad_ready_counts=dict.fromkeys(complete, 1))


def start_at_end(group: Any) -> None:
    """Make ``group``, which no backward pass of this step uses, start its reduction after the backward passes."""
    set_known(group, is_first_batch=True, golden_per_param_grad_ready_counts={})


def keeps_parameters(chunks: Iterable) -> bool:
    """Return whether between two steps each rank has all of its parameters, in buffers that its data-parallel peers
    have bit for bit.

    With --overlap-param-gather or FSDP2 it has not; experts' buffers belong to other groups, those of fp8 are not all.
    """
    return all(
        not is_fsdp2(chunk)
        and not chunk.ddp_config.overlap_param_gather
        and not chunk.expert_parallel_bucket_groups
        and all(b.param_data is not None and b.param_data.is_floating_point() for b in chunk.buffers)
        for chunk in chunks
    )


def publish_parameters(chunks: Iterable, optimizer, giver: int | None = None) -> None:
    """Copy the optimizer's main parameters into the model. All ranks have to call it.

    The function uses the cast and the all-gather of megatron-core's optimizer step, so the result is bitwise identical
    to that of a step.

    Args:
        chunks: model chunks.
        optimizer: their optimizer.
        giver: rank among the data-parallel peers whose model has all parameters already. The others get them from it,
            which moves less memory than the all-gather (DEADPOOL, section VI-E). Needs :func:`keeps_parameters`.
    """
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        with torch.no_grad():  # core's HybridDeviceOptimizer updates copies of the parameters, on the host or in fp32
            for param, main in getattr(getattr(part, "optimizer", None), "param_to_inner_param", {}).items():
                param.data.copy_(main.data)
        if hasattr(part, "_copy_main_params_to_model_params"):
            with torch.no_grad():
                part._copy_main_params_to_model_params()
    if not any(isinstance(p, DistributedOptimizer) for p in getattr(optimizer, "chained_optimizers", [optimizer])):
        return
    for chunk in chunks:
        if giver is None:
            chunk.start_param_sync(force_sync=True)
            continue
        for buffer in chunk.buffers:
            dist.broadcast(buffer.param_data, giver, parallel_state.get_data_parallel_group(with_context_parallel=True))


def bucket_groups(chunk) -> list:
    """Return all gradient bucket groups of one chunk, dense and expert; FSDP2 has none."""
    return [] if is_fsdp2(chunk) else [*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups]


@torch.no_grad()
def gradients(chunks: Iterable) -> list[torch.Tensor]:
    """Return all gradients of this rank: with FSDP2 its shards, zeros where no backward pass has made any."""
    trained = [p for chunk in chunks if is_fsdp2(chunk) for p in chunk.module.parameters() if p.requires_grad]
    for param in trained:
        param.grad = torch.zeros_like(param) if param.grad is None else param.grad
    buckets = (bucket for chunk in chunks for group in bucket_groups(chunk) for bucket in group.buckets)
    return [*(bucket.grad_data for bucket in buckets), *(param.grad.to_local() for param in trained)]


def set_known(target, **values) -> None:
    """Set attributes of an object of core.

    Raises:
        UserError: the installed core's object lacks an attribute.
    """
    for name, value in values.items():
        if not hasattr(target, name):
            raise UserError(
                f"{type(target).__name__} of megatron-core {core.__version__} has no {name}, which ft sets",
                "use a supported version of megatron-core (python -m megatron.patches)",
            )
        setattr(target, name, value)
