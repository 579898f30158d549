"""The cases to compare: FT-HSDP's published stalls, and the stalls of this implementation at the same scale."""

import json
import statistics
from dataclasses import dataclass
from pathlib import Path

from ft.base.errors import UserError
from ft.lab.simulate.hsdp.model import Case

BENCH = "hsdp_recovery"
HANG_STEPS, HANG_S = 3.0, 1.0
"""Default stall for a hang: three steps plus one second, the goal of ``tools/bench/hsdp_recovery.py``."""


@dataclass(frozen=True)
class Job:
    """The training job that fails.

    Attributes:
        gpus: number of GPUs.
        replicas: number of replicas.
        interval_s: mean time between two failures anywhere, in seconds.
        step_s: duration of a training step, in seconds.
        rebuild_s: seconds from a failure until the replica asks to rejoin, or until all have restarted.
    """

    gpus: int
    replicas: int
    interval_s: float
    step_s: float
    rebuild_s: float


@dataclass(frozen=True)
class Stalls:
    """The stalls of this implementation: seconds that the other replicas wait beyond their normal step.

    Attributes:
        killed_s: stall after a killed process.
        rejoin_s: stall when a replica rejoins.
        hung_s: stall after a hang; None: the default of :data:`HANG_STEPS` and :data:`HANG_S`.
        source: where the numbers come from, for the output.
    """

    killed_s: float
    rejoin_s: float
    hung_s: float | None
    source: str


def cases(job: Job, ours: Stalls) -> list[Case]:
    """Return synchronous recovery, four readings of FT-HSDP, section 6.1, and this implementation's hang and kill.

    A measured stall is the time that other replicas wait beyond their normal step on a small machine. The step that is
    repeated takes a full step of the large job, so ``job.step_s`` is added.
    """

    def case(key: str, name: str, stall_s: float, rejoin_s: float = 0.0, replicas: int = job.replicas) -> Case:
        rebuild_s = max(job.rebuild_s, stall_s)
        return Case(key, name, replicas, job.interval_s, job.step_s, stall_s, rebuild_s, rejoin_s)

    hung = HANG_STEPS * job.step_s + HANG_S if ours.hung_s is None else ours.hung_s
    return [
        case("sync", "all restart", job.rebuild_s, replicas=1),
        case("formula", "paper: 3 min", 180.0),
        case("measured", "3 min + 100 s", 180.0, 100.0),
        case("intended", "fixed: 1.5 min", 90.0),
        case("intended_rejoin", "1.5 min + 100 s", 90.0, 100.0),
        case("ours_hang", "ours, hang", job.step_s + hung, ours.rejoin_s),
        case("ours", "ours, kill", job.step_s + ours.killed_s, ours.rejoin_s),
    ]


def read(path: str) -> Stalls:
    """Return the median stalls from result lines of ``tools/bench/hsdp_recovery.py``.

    Reads from each line of a kill, in milliseconds, ``stall_ms``, and ``rejoin_longest_ms`` less ``step_ms``. Lines of
    hangs are ignored: a hang is detected after a number of steps, so its cost with millisecond steps says nothing about
    longer steps.

    Raises:
        UserError: the file cannot be read, or has no line of a kill in which these are numbers.
    """
    try:
        lines = [json.loads(line) for line in Path(path).read_text().splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise UserError(f"--results {path}: {error}", _FIX) from error
    kills = []
    for line in lines:
        if isinstance(line, dict) and line.get("bench") == BENCH and line.get("kind") == "kill":
            if line.get("system", "ours") != "ours":
                continue
            found = [line.get(name) for name in ("stall_ms", "rejoin_longest_ms", "step_ms")]
            if all(_is_time(value) for value in found):
                stall, longest, step = (value / 1e3 for value in found)
                kills.append((stall, max(0.0, longest - step)))
    if not kills:
        raise UserError(f"--results {path} holds no line of {BENCH} with the stalls of a kill", _FIX)
    killed, rejoin = (statistics.median(values) for values in zip(*kills, strict=True))
    return Stalls(killed, rejoin, None, f"measured: {Path(path).name}")


def _is_time(value) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0.0 <= value < float("inf")


_FIX = f"give a file that tools/bench/{BENCH}.py wrote, or --stall and --rejoin-stall"
