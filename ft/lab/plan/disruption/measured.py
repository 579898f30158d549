"""Read the times of a recorded run for ``ft plan disruption --from-run``: seconds of a step and of a hot-swap's parts.

In a hot-swap a standby (a warm, idle worker) takes over from a failed one.
"""

import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field

from ft.base.errors import UserError
from ft.observe.report.record import goodput
from ft.record.recoveries import REPLACED, RESTART, recoveries
from ft.record.run import Run

_PART_OF = {
    "detect": "detect",
    "release": "detect",
    "assemble": "detect",
    "rebuild": "rebuild",
    "restore": "restore",
    "resume": "restore",
}
"""Phase of a recovery (:mod:`ft.record.recoveries`) -> part of a hot-swap in the cost model."""


@dataclass(frozen=True)
class Measured:
    """Times from a run's events and metrics.

    Attributes:
        step_s: median seconds of a step, None without metrics.
        parts: name of a part of a hot-swap -> mean seconds.
        hot_swaps: number of hot-swaps (recoveries in which a standby took over) in the run.
        restart_s: mean seconds of a warm restart from the checkpoint, None without one.
    """

    step_s: float | None
    parts: dict[str, float] = field(default_factory=dict)
    hot_swaps: int = 0
    restart_s: float | None = None


def measured(run: Run) -> Measured:
    """Read the times of a run.

    Raises:
        UserError: no hot-swap was completed in it.
    """
    found = recoveries(run.events)
    swaps = [recovery for recovery in found if recovery.outcome == REPLACED and recovery.phases]
    if not swaps:
        raise UserError(
            f"{run.folder} contains no completed hot-swap: it has {len(found)} recoveries, and in none of them a "
            "standby took over",
            "give a run in which one did, or its times as --detect, --rebuild and --restore",
        )
    parts = dict.fromkeys(_PART_OF.values(), 0.0)
    for recovery in swaps:
        for phase, seconds in recovery.phases.items():
            parts[_PART_OF[phase]] += seconds / len(swaps)
    restarts = [recovery.total for recovery in found if recovery.outcome == RESTART]
    step = goodput(run.metrics, run.events, found).step
    return Measured(step, parts, len(swaps), _mean(seconds for seconds in restarts if seconds is not None))


def _mean(values: Iterable[float]) -> float | None:
    found = list(values)
    return statistics.fmean(found) if found else None
