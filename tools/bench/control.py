"""Measure the death of the control plane: the time without decisions, and its effect on training and recoveries.

    python tools/bench/control.py

Prints one JSON line, from one run of four ranks. `away_ms` is the time from the SIGKILL of the control plane to the
first decision of its successor, if a standby process is ready to take over; `cold_away_ms` is the same without such a
process. `step_ratio` is the median step time in the second after such a kill, divided by that of the whole run.
`recovery_ms` is the time from the SIGKILL of a worker to the next step; `recovery_without_control_ms` is the same if
the control plane is killed at the same moment.
"""

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

import in_ranks
import small_runs as runs

from ft.base import events
from megatron import patches

COLD_S, WARM_S, SPACING_S = 4, 30, 8


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="how often each thing is done")
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        patches.apply()
        train(run, runs.make_corpus(Path(folder)), arguments.rounds)
        print(json.dumps(result(run) | vars(arguments)))
    return 0


def plan(rounds: int) -> tuple[list[str], int]:
    """Return (faults, seconds until the last one is over)."""
    faults, at = [f"kill-control@time={COLD_S}s"], WARM_S
    for turn in range(rounds):
        faults += [f"kill-control@time={at}s", f"kill@time={at + SPACING_S}s:rank={turn % 4}"]
        both = at + 2 * SPACING_S
        faults += [f"kill-control@time={both}s", f"kill@time={both}s:rank={(turn + 1) % 4}"]
        at = both + SPACING_S
    return faults, at


def train(folder: Path, corpus: str, rounds: int) -> None:
    faults, seconds = plan(rounds)
    command = [sys.executable, "-m", "ft", "run", "--nproc-per-node", "4", "--standby", "1", "--run-dir", str(folder)]
    command += ["--inject", ",".join(faults), str(in_ranks.ROOT / "pretrain_gpt.py"), *runs.BASE.split()]
    command += ["--data-path", corpus, "--use-distributed-optimizer", "--ft-hot-swap"]
    command += ["--train-iters", "1000000", "--exit-duration-in-mins", str(seconds / 60)]
    in_ranks.run(command, folder.parent)


def result(folder: Path) -> dict:
    history = events.read(folder / "events.jsonl")
    killed, lost = walls(history, "kill-control"), walls(history, "kill")
    away = until(history, events.CONTROL_BACK, killed)
    recovered = until(history, events.RESUMED, lost)
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    usual = statistics.median(step["step_time_s"] for step in steps)
    alone = [step["step_time_s"] for k in killed[1::2] for step in steps if k < step["wall"] < k + 1]
    return {
        "bench": "control",
        "cold_away_ms": away[0],
        "away_ms": away[1:],
        "step_ratio": round(statistics.median(alone) / usual, 3),
        "recovery_ms": recovered[::2],
        "recovery_without_control_ms": recovered[1::2],
    }


def walls(history: list[events.Event], kind: str) -> list[float]:
    """Return the wall times at which faults of this kind were injected."""
    return [event.wall for event in history if event.name == events.FAULT_INJECTED and event.detail["kind"] == kind]


def until(history: list[events.Event], name: str, moments: list[float]) -> list[int]:
    """Return the milliseconds from each moment to the next event of this name."""
    found = [event.wall for event in history if event.name == name]
    return [round(1e3 * (min(wall for wall in found if wall > moment) - moment)) for moment in moments]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
