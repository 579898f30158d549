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
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests/helpers")]

from ft.base import events  # noqa: E402

COLD_S, WARM_S, SPACING_S = 4, 30, 8
DEADLINE_S = 300


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="how often each thing is done")
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        train(run, corpus_in(Path(folder)), arguments.rounds)
        print(json.dumps(result(run) | vars(arguments)))
    return 0


def corpus_in(folder: Path) -> str:
    import small_runs as runs

    from megatron import patches

    patches.apply()
    return runs.make_corpus(folder)


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
    import small_runs as runs

    faults, seconds = plan(rounds)
    command = [sys.executable, "-m", "ft", "run", "--nproc-per-node", "4", "--standby", "1", "--run-dir", str(folder)]
    command += ["--inject", ",".join(faults), str(ROOT / "pretrain_gpt.py"), *runs.BASE.split(), "--ft-hot-swap"]
    command += ["--train-iters", "1000000", "--data-path", corpus, "--use-distributed-optimizer"]
    command += ["--exit-duration-in-mins", str(seconds / 60)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    if done.returncode:
        raise SystemExit(f"exit code {done.returncode}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")


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
