"""Checks the flags of double execution (SpareTrain).

Modes of the trainer that DMR cannot execute a second time are in the table of modes (:mod:`ft.protection.table`).
"""

from collections.abc import Iterator
from typing import Any

from ft.base.errors import Problem

_PADDING = ("--moe-router-padding-for-fp8", "--moe-router-padding-for-quantization")
"""Flags that pad routing maps by a kernel outside of functions, if experimental fused permutation is on as well."""


def check(options: Any, grid: Any, replicas: int) -> Iterator[Problem]:
    """Yield (problem, fix); see ``checks`` of :class:`ft.protection.table.ProtectionEntry`."""
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
    yield from _of_experts(options)


def _of_experts(options: Any) -> Iterator[Problem]:
    """Yield (problem, fix) for flags of mixtures of experts."""
    if _value(options, "--moe-flex-dispatcher-backend") == "ncclep":
        problem = "--moe-flex-dispatcher-backend ncclep prepares messages by an operator that communicates, which DMR"
        yield f"{problem} cannot execute a second time", "use deepep or hybridep, or drop DMR"
    is_fused = getattr(options.training, "enable_experimental", False) and _value(options, "--moe-permute-fusion")
    for flag in _PADDING if is_fused else ():
        if _value(options, flag):
            problem = f"{flag} with fused permutation pads routing maps by a kernel outside of functions"
            yield f"{problem}, which DMR cannot execute a second time", f"drop {flag}, --moe-permute-fusion or DMR"
    balancing = _value(options, "--moe-router-load-balancing-type")
    has_loss = any("aux_loss" in str(one) for one in (balancing if isinstance(balancing, list) else [balancing]))
    if _value(options, "--moe-router-fusion") and has_loss and options.fault_tolerance.ft_dmr_unstable is None:
        problem = "--moe-router-fusion adds up the auxiliary loss in another order each time"
        fix = "drop --moe-router-fusion, or leave its function out: --ft-dmr-unstable FILE"
        yield f"{problem}, which DMR takes for an error", fix


def _value(options: Any, flag: str) -> Any:
    """Return the value of a flag of megatron-core; None if this release does not have it."""
    return getattr(options.core, flag.removeprefix("--").replace("-", "_"), None)
