"""Checks the flags of hot-swap (DEADPOOL)."""

from collections.abc import Iterator
from typing import Any

from ft.base.errors import Problem


def check(options: Any, grid: Any, replicas: int) -> Iterator[Problem]:
    """Yield (problem, fix); see ``checks`` of :class:`ft.protection.table.ProtectionEntry`."""
    wanted, factor = options.fault_tolerance.ft_snapshot_peers, options.fault_tolerance.ft_evict_stragglers
    if factor is not None and not factor > 1.0:
        yield (
            f"--ft-evict-stragglers is {factor:g}",
            "a factor above 1, such as 1.2",
        )
    if factor is not None and not options.fault_tolerance.ft_hot_swap:
        yield "--ft-evict-stragglers hands a slow rank to hot-swap, which is off", "add --ft-hot-swap"
    if not options.fault_tolerance.ft_hot_swap:
        return
    others = grid.world_size - 1
    if wanted < 0 or (wanted == 0 and not options.fault_tolerance.rebuilds_stages):
        fix = "at least 1, or 0 with --ft-checkfree: without a copy a dead worker's state is gone"
        yield f"--ft-snapshot-peers is {wanted}", fix
    elif others == 0:
        yield "--ft-hot-swap protects a run by copies at other workers, and there is one worker", "run on 2 or more"
    elif wanted > others:
        yield f"--ft-snapshot-peers {wanted} with {others} other worker(s) that could hold a copy", f"at most {others}"
