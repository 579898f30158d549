"""Resets what an aborted step leaves behind in megatron-core's objects.

Nothing is replaced here. This module holds, in one place, the attributes of core that recovery has to write. A core
that lacks one of them is rejected with the attribute's name.
"""

from collections.abc import Iterable

import torch

from ft.base.errors import UserError
from megatron import core
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.transformer.moe.moe_utils import clear_aux_losses_tracker
from megatron.patches.releases import forget_answers_agreed_on_once


def abandon_step(chunks: Iterable, optimizer) -> None:
    """Make ``chunks`` (DistributedDataParallel) and ``optimizer`` ready for a first step again; no collective.

    Handles of operations that will never end are dropped, and so are gradients. Bucket groups count gradients anew as
    in a first step, because a worker that has just joined does, and all members of a group must reduce in the same
    order.
    """
    for chunk in chunks:
        chunk.zero_grad_buffer()
        for group in bucket_groups(chunk):
            _set(group, grad_reduce_handle=None, param_gather_handle=None, param_gather_dispatched=False)
            _set(group, is_first_batch=True, is_last_microbatch=True)
            _set(group, golden_per_param_grad_ready_counts={}, per_param_grad_ready_counts={})
        for param in chunk.module.parameters():
            param.grad = None
    optimizer.zero_grad()
    forget_answers_agreed_on_once(optimizer)
    clear_aux_losses_tracker()
    timers = chunks[0].config.timers if chunks else None
    if timers is not None:
        for timer in timers._timers.values():
            timer._started = False
            timer.reset()


def expect_no_backward(chunks: Iterable) -> None:
    """Prepare for a gradient synchronisation without a backward pass that starts it.

    It then starts by itself, as that of a first batch does. Call it on all ranks of a model.
    """
    for chunk in chunks:
        for group in bucket_groups(chunk):
            _set(group, is_first_batch=True, golden_per_param_grad_ready_counts={})


def publish_parameters(chunks: Iterable, optimizer) -> None:
    """Copy the optimizer's main parameters into the model on all ranks. Collective.

    Core's own cast and all-gather do this after every step, so the result is bit for bit that of the step.
    """
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if hasattr(part, "_copy_main_params_to_model_params"):
            with torch.no_grad():
                part._copy_main_params_to_model_params()
    if not any(isinstance(p, DistributedOptimizer) for p in getattr(optimizer, "chained_optimizers", [optimizer])):
        return
    for chunk in chunks:
        chunk.start_param_sync(force_sync=True)


def bucket_groups(chunk) -> list:
    """Return all gradient bucket groups of one DistributedDataParallel chunk, dense and expert."""
    return [*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups]


def _set(target, **values) -> None:
    for name, value in values.items():
        if not hasattr(target, name):
            raise UserError(
                f"{type(target).__name__} of megatron-core {core.__version__} has no {name}, which recovery resets",
                "use a supported version of megatron-core (python -m megatron.patches)",
            )
        setattr(target, name, value)
