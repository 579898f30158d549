"""The cases that ``ft simulate hsdp`` compares: FT-HSDP's published stalls, and those of this implementation.

A stall is the time that all replicas wait, when a replica fails or when it rejoins after its rebuild.
"""

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
        rebuild_s: seconds from a failure until the failed replica asks to rejoin; with synchronous recovery, until the
            whole job has restarted.
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
    """Return the seven cases to compare.

    They are synchronous recovery, four interpretations of the stalls in FT-HSDP, section 6.1, and this implementation
    after a hang and after a kill. This implementation's stalls are measured on a small machine, as time beyond a normal
    step. The failed step is repeated, and takes a full step of the large job, so ``job.step_s`` is added.
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
        case("ours_hang", "our stall, hang", job.step_s + hung, ours.rejoin_s),
        case("ours", "our stall, kill", job.step_s + ours.killed_s, ours.rejoin_s),
    ]


def read(path: str) -> Stalls:
    """Return the median stalls from a result file of ``tools/bench/hsdp_recovery.py``.

    Each line of a kill gives two stalls in milliseconds: ``stall_ms``, and ``rejoin_longest_ms`` less ``step_ms``.
    Lines of hangs are ignored: a hang is detected after a number of steps, so its cost with millisecond steps does not
    predict the cost with longer steps.

    Raises:
        UserError: the file cannot be read, or no line of a kill has valid stalls.
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
        raise UserError(f"--results {path} contains no line of {BENCH} with the stalls of a kill", _FIX)
    killed, rejoin = (statistics.median(values) for values in zip(*kills, strict=True))
    return Stalls(killed, rejoin, None, f"measured: {Path(path).name}")


def _is_time(value) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0.0 <= value < float("inf")


_FIX = f"give a file that tools/bench/{BENCH}.py wrote, or --stall and --rejoin-stall"
