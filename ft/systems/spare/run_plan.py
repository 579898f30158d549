"""The plan of a SPARe run, as ``ft plan spare optimize --json`` writes it: the redundancy, and the checkpoint interval.

``ft run --ft-spare-plan FILE`` reads it. Redundancy is the number of groups (replicas of the model) that host each
shard type, a part of the global batch.
"""

import os
from dataclasses import dataclass

from ft.base import bounded_json, files
from ft.base.errors import UserError


@dataclass(frozen=True)
class RunPlan:
    """What a plan says about a run.

    Attributes:
        redundancy: number of hosts of each shard type.
        save_interval: steps between two checkpoints.
    """

    redundancy: int
    save_interval: int


def steps_between(period_s: float, save_s: float, step_s: float) -> int:
    """Return the number of steps between two checkpoints.

    Args:
        period_s: seconds from the end of a checkpoint to the end of the next (SPARe, formula (1)).
        save_s: duration of a checkpoint in seconds.
        step_s: duration of a step in seconds.
    """
    return max(1, round((period_s - save_s) / step_s))


def read(path: str | os.PathLike, groups: int) -> RunPlan:
    """Return the plan for a run of ``groups`` groups.

    Args:
        path: the output of ``ft plan spare optimize --json``; it may be for several numbers of groups.
        groups: number of groups.

    Raises:
        UserError: the file cannot be read, is not such an output, is for other numbers of groups, or recommends
            checkpoints alone.
    """
    fix = f"write it anew: ft plan spare optimize --groups {groups} ... --json"
    try:
        found = bounded_json.loads(files.read(path))
        plans = {int(each["groups"]): each for each in (found if isinstance(found, list) else [found])}
        numbers = {
            size: (int(each["recommended"]), int(each["checkpoint_interval_steps"])) for size, each in plans.items()
        }
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"--ft-spare-plan {path} cannot be read: {error!r}", fix) from error
    if groups not in numbers:
        sizes = ", ".join(map(str, sorted(numbers)))
        raise UserError(f"--ft-spare-plan {path} is for {sizes} groups, and the run has {groups}", fix)
    redundancy, interval = numbers[groups]
    if redundancy < 2 or interval < 1:
        raise UserError(f"--ft-spare-plan {path} recommends checkpoints alone, without SPARe", "drop --ft-spare-plan")
    return RunPlan(redundancy, interval)
