"""Times from the record of a run, and rates of failures from Slurm's accounting."""

import csv
import statistics
from typing import Any

from ft.base import events, files
from ft.base.errors import UserError
from ft.lab.plan.goodput.histories import FailureCause
from ft.observe.report.record import goodput
from ft.record.recoveries import REPLACED, RESTART, recoveries
from ft.record.run import load

_SACCT = (
    "write it with sacct -a -X -D -P -S 2026-01-01 -o JobID,State,ElapsedRaw,NNodes > FILE (without -S: only today)"
)


def of_run(folder: str) -> dict[str, tuple[float, str]]:
    """Return key -> (value, where it was measured) for the times that a run's record has.

    Raises:
        UserError: the folder holds no run, or none of the times.
    """
    run = load(folder)
    found = recoveries(run.events)
    swaps = [each.total for each in found if each.outcome == REPLACED and each.total is not None]
    restarts = [each.total for each in found if each.outcome == RESTART and each.total is not None]
    saves = [event.detail.get("seconds") for event in run.events if event.name == events.SAVED]
    saves = [seconds for seconds in saves if isinstance(seconds, int | float) and seconds >= 0]
    times: dict[str, tuple[float, str]] = {}
    step = goodput(run.metrics, run.events, found).step
    if step:
        times["step_time"] = step, f"measured ({folder}: median step)"
    for key, values, what in (
        ("swap_time", swaps, "hot-swaps"),
        ("restart_time", restarts, "restarts"),
        ("save_time", saves, "saves"),
    ):
        if values:
            times[key] = statistics.fmean(values), f"measured ({folder}: mean of {len(values)} {what})"
    if not times:
        raise UserError(f"{folder} has no times of steps, saves or recoveries", "give another run, or the times")
    return times


def of_sacct(path: str, repair_s: float) -> list[FailureCause]:
    """Return the failures of nodes that Slurm has recorded, per node.

    Args:
        path: output of ``sacct -P`` with the columns JobID, State, ElapsedRaw and NNodes.
        repair_s: mean seconds until a failed node is back.

    Raises:
        UserError: the file cannot be read, or has no node failure.
    """
    try:
        rows: list[dict[str, Any]] = list(csv.DictReader(files.read_text(path).splitlines(), delimiter="|"))
        jobs = [row for row in rows if "." not in row["JobID"]]
        seconds = sum(float(row["ElapsedRaw"]) * float(row["NNodes"]) for row in jobs)
        failed = sum(row["State"].startswith("NODE_FAIL") for row in jobs)
    except (OSError, ValueError, KeyError, TypeError, csv.Error) as error:
        raise UserError(f"--from-sacct {path} cannot be read: {error!r}", _SACCT) from error
    if not failed or seconds <= 0:
        problem = f"{path} has {failed} job(s) with the state NODE_FAIL in {seconds / 3600:,.0f} node hours"
        raise UserError(problem, _SACCT)
    return [
        FailureCause(
            f"{path}: {failed} nodes failed in {seconds / 3600:,.0f} node hours", seconds / failed, 1, 1, repair_s
        )
    ]
