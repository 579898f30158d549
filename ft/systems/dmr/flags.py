"""Checks the flags of double execution (SpareTrain)."""

from collections.abc import Iterator
from typing import Any

from ft.base.errors import Problem


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
