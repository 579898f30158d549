"""Checks of the trainer's flags for a run with FT-HSDP replicas."""

from collections.abc import Iterator
from typing import Any

from ft.base.errors import Problem

_FP32_GRADIENTS = "param_name_patterns_for_fp32_local_accumulation"
"""Option of megatron-core from release 0.19: parameters whose gradients are accumulated outside the gradient buffer."""


def check(options: Any, grid: Any, replicas: int) -> Iterator[Problem]:
    """Yield (problem, fix); see ``checks`` of :class:`ft.protection.table.ProtectionEntry`. ``grid``: of a replica."""
    if not replicas:
        return
    training = options.training
    if getattr(training, "rampup_batch_size", None) is not None:  # the reference trainer has none
        yield (
            "--rampup-batch-size does not go with replicas: the samples of the run are divided among them in steps of "
            "one size",
            "drop it, or --ft-hsdp-replicas",
        )
    if options.core.moe_router_enable_expert_bias:
        yield (
            "--moe-router-enable-expert-bias does not go with replicas: each would move the bias by its own tokens",
            "drop it, or --ft-hsdp-replicas",
        )
    if "global_aux_loss" in _balancing(options.core):
        yield (
            "--moe-router-load-balancing-type global_aux_loss does not go with replicas: each would balance its own "
            "tokens only, because megatron-core sums over the ranks of one replica",
            "use aux_loss or seq_aux_loss, or drop --ft-hsdp-replicas",
        )
    if getattr(options.core, "qk_clip", False):
        yield (
            "--qk-clip does not go with replicas: each would clip by its own attention logits, because megatron-core "
            "takes the largest over the ranks of one replica",
            "drop it, or --ft-hsdp-replicas",
        )
    if getattr(options.core, _FP32_GRADIENTS, None):
        yield (
            f"--ddp-{_FP32_GRADIENTS.replace('_', '-')} does not go with replicas: they exchange the gradient buffer, "
            "and these gradients are not in it when the optimizer reads them",
            "use --accumulate-allreduce-grads-in-fp32, or drop --ft-hsdp-replicas",
        )
    whole = replicas * training.micro_batch_size * grid.dp
    if training.global_batch_size % whole:
        yield (
            f"global batch {training.global_batch_size} is not a multiple of {replicas} replicas x micro batch "
            f"{training.micro_batch_size} x DP {grid.dp} of a replica = {whole}",
            f"use a multiple of {whole}",
        )


def _balancing(core: Any) -> tuple[str, ...]:
    """Return the names of the losses and methods that balance experts."""
    given = core.moe_router_load_balancing_type
    return (given,) if isinstance(given, str) else tuple(given or ())
