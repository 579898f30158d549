"""Checks the flags of double execution (SpareTrain)."""

from collections.abc import Iterator
from typing import Any

from ft.base.errors import Problem

_REPLAYED = "replays kernels that nobody calls"
_OUTSIDE = {
    "--tp-comm-overlap": "lets kernels write to the buffers of other ranks",
    "--delay-wgrad-compute": "computes gradients outside of the backward pass",
    "--overlap-dispatch-backward-with-experts-wgrad": "computes gradients outside of the backward pass",
    "--moe-paged-stash": "moves activations by kernels outside of the layers",
    "--moe-router-padding-for-fp8": "pads routing maps by a kernel outside of the layers",
    "--moe-router-padding-for-quantization": "pads routing maps by a kernel outside of the layers",
    "--fp8-param-gather": "casts parameters by kernels outside of the layers",
    "--fp4-param-gather": "casts parameters by kernels outside of the layers",
    "--cuda-graph-impl": _REPLAYED,
    "--enable-cuda-graph": _REPLAYED,
    "--external-cuda-graph": _REPLAYED,
}
"""Flag of megatron-core -> what it does outside of operators and of functions."""

_SHARDS = {
    "--tensor-parallel-num-weight-shards": ("tensor_model_parallel_size",),
    "--expert-tensor-parallel-num-weight-shards": ("expert_tensor_parallel_size", "tensor_model_parallel_size"),
}
"""Flag of generalised tensor parallelism -> the field with the number of shards without it; the next one holds if it is
None.

Each use of a sharded weight starts the all-gather of the next weight, and finishes the reduce-scatter and the sum of
the gradient that another use has started, on other streams, by state that belongs to the chain of all weights."""


def check(options: Any, grid: Any, replicas: int) -> Iterator[Problem]:
    """Yield (problem, fix); see :meth:`ft.protection.contract.Protection.check`."""
    asked = options.fault_tolerance
    if not asked.intercepts_operators:
        if asked.ft_dmr_unstable is not None:
            yield "--ft-dmr-unstable has no effect, because DMR is off", "add --ft-dmr piggyback"
        if asked.ft_dmr_inject:
            yield "--ft-dmr-inject has no effect, because DMR is off", "add --ft-dmr naive|piggyback"
        return
    if asked.ft_dmr is not None and asked.ft_dmr_plan is not None:
        yield f"--ft-dmr {asked.ft_dmr} and --ft-dmr-plan contradict each other", "remove one of them"
    if asked.ft_dmr_plan is not None and asked.ft_checkfree_plus:
        problem = "--ft-dmr-plan describes megatron-core's own schedules, and --ft-checkfree-plus needs another one"
        yield problem, "replace the plan by --ft-dmr piggyback"
    if asked.ft_dmr_profile is not None and asked.ft_dmr_inject:
        yield "--ft-dmr-profile measures a run, and --ft-dmr-inject flips bits to be found in one", "remove one of them"
    if asked.ft_dmr_retries < 0:
        yield f"--ft-dmr-retries is {asked.ft_dmr_retries}", "0 or more"
    for flag, why in _OUTSIDE.items():
        value = getattr(options.core, flag.removeprefix("--").replace("-", "_"), None)
        if value not in (None, False, "none"):
            shown = flag if value is True else f"{flag} {value}"
            yield f"{shown} {why}, which DMR cannot execute a second time", f"drop {flag}, or DMR"
    for flag, fields in _SHARDS.items():
        shards = getattr(options.core, flag.removeprefix("--").replace("-", "_"), None)
        plain = next((size for name in fields if (size := getattr(options.core, name, None)) is not None), 1)
        if shards is not None and shards > plain:
            problem = "gathers the next weight and sums another one's gradient within each layer"
            yield f"{flag} {shards} {problem}, which DMR cannot execute a second time", f"drop {flag}, or DMR"
