"""Compare the time from SIGKILL to the next step with hot-swap and with a restart of the job by torchrun.

    python tools/bench/recovery.py --ranks 4
    python tools/bench/recovery.py --ranks 6 --kind stage     # CheckFree: a stage and the only copy of it are lost
    python tools/bench/recovery.py --checkout Megatron-LM --restarts 0    # NVIDIA's own trainer, protected
    python tools/bench/recovery.py --hidden-size 288 --against 1440 --phase backward --spacing 4 --restarts 0
    git worktree add /tmp/before d539d830   # then the same with --before /tmp/before: two commits in turn

Prints one JSON line. Both sides train the same small model on the same data in the same layout, one after the other.
`ratio` is (torchrun's median) / (hot-swap's median) of the time from a worker's SIGKILL to the beginning of the first
step after it. torchrun restarts from a checkpoint of exactly the step at which the worker was killed, its best case.
With `--kind stage` each rank is a pipeline stage. A middle stage and the rank that holds its copy are killed at the
same time, and the stage is rebuilt from its neighbours. With `--checkout` only our side is measured, with
NVIDIA's trainer of that checkout. With `--against` a larger model is measured in turn with the first, and
`times_as_long` is (its median) / (the median of the first). Hidden sizes of 288 and 1440 are 4 M and 101 M parameters.
With `--before` all of that is also measured with another checkout of this project, in turn with this one.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
from in_ranks import ROOT, median_ms

from ft.base import events
from ft.record.recoveries import PHASES, recoveries

LAYOUTS = {2: (1, 1), 4: (1, 2), 8: (2, 2), 16: (2, 4)}
"""Ranks -> (tensor, pipeline) parallel size; the rest is data parallelism."""
FIRST_FAULT, SPACING = 10, 12
DEADLINE_S = 1800
KILL, HANG, STAGE = "kill", "hang", "stage"


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4, help="2, 4, 8 or 16; with --kind stage 4 or more")
    parser.add_argument("--faults", type=int, default=7, help="faults on our side; the first one warms up")
    parser.add_argument("--restarts", type=int, default=3, help="kills on torchrun's side; 0 leaves it out")
    parser.add_argument("--hidden-size", type=int, default=32)
    parser.add_argument("--against", type=int, metavar="HIDDEN_SIZE", help="a second model, measured in turn with it")
    parser.add_argument("--before", type=Path, metavar="FOLDER", help="a checkout of this project to compare with")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each model, with --against or --before")
    parser.add_argument("--phase", help="point of the step at which workers are killed (default: between two steps)")
    parser.add_argument("--spacing", type=int, default=SPACING, help="steps from one fault to the next")
    parser.add_argument("--kind", default=KILL, choices=[KILL, HANG, STAGE], help="what is done, and to whom")
    parser.add_argument("--checkout", type=Path, metavar="FOLDER", help="a checkout of Megatron-LM for our side")
    arguments = parser.parse_args(argv)
    if arguments.ranks < 4 if arguments.kind == STAGE else arguments.ranks not in LAYOUTS:
        parser.error(f"no layout for {arguments.ranks} ranks and --kind {arguments.kind}")
    if arguments.checkout and arguments.restarts:
        parser.error("torchrun's side trains with this project's trainer: give --restarts 0 with --checkout")
    if arguments.checkout and not (arguments.checkout / "pretrain_gpt.py").is_file():
        parser.error(f"{arguments.checkout} has no pretrain_gpt.py")
    with tempfile.TemporaryDirectory() as folder:
        import small_runs as runs

        from megatron import patches

        patches.apply()
        corpus = runs.make_corpus(Path(folder))
        sizes = [arguments.hidden_size] if arguments.against is None else [arguments.hidden_size, arguments.against]
        if arguments.before is not None:  # each commit describes a dataset in its own way, and can do without that
            Path(f"{corpus}.meta.json").unlink()
        roots = [ROOT] if arguments.before is None else [arguments.before.resolve(), ROOT]
        ours: dict[tuple[Path, int], list] = {(root, size): [] for root in roots for size in sizes}
        for number in range(1 if len(ours) == 1 else arguments.rounds):
            for turn, (root, size) in enumerate(ours):
                ours[root, size] += hot_swap(arguments, Path(folder) / f"ours{number}-{turn}", corpus, size, root)
        theirs = [torchrun(arguments, Path(folder) / f"torchrun{i}", corpus) for i in range(arguments.restarts)]
    print(json.dumps(result(arguments, ours, theirs), default=str))
    return 0


def flags(arguments: argparse.Namespace, corpus: str, steps: int, size: int) -> list[str]:
    import small_runs as runs

    ranks = arguments.ranks
    tp, pp = (1, ranks) if arguments.kind == STAGE else LAYOUTS[ranks]
    layers = f"--num-layers {ranks} " if arguments.kind == STAGE else ""
    base = f"{runs.BASE} --data-path {corpus}"
    if arguments.checkout:
        import megatron_lm_trees as checkouts

        base = f"{checkouts.BASE} --num-layers 4 --global-batch-size 8 --mock-data --lr-decay-iters {steps}"
        base += f" --eval-iters 1 --eval-interval {steps + 1}"
    return (
        f"{base} --hidden-size {size} --train-iters {steps} {layers}"
        f"--tensor-model-parallel-size {tp} --pipeline-model-parallel-size {pp} --use-distributed-optimizer"
    ).split()


def first(arguments: argparse.Namespace) -> int:
    return min(FIRST_FAULT, arguments.spacing)


def fault(arguments: argparse.Namespace, number: int) -> str:
    """Return fault ``number`` for `--inject`, with all workers that die in it."""
    step = first(arguments) + number * arguments.spacing
    at = f":phase={arguments.phase}" if arguments.phase else ""
    if arguments.kind != STAGE:
        return f"{arguments.kind}@step={step}:rank={(number * 3 + 1) % arguments.ranks}{at}"
    stage = 1 + number % (arguments.ranks - 3)  # the next stage holds its copy; the last stage survives
    return f"kill@step={step}:rank={stage}{at},kill@step={step}:rank={stage + 1}{at}"


def hot_swap(arguments: argparse.Namespace, folder: Path, corpus: str, size: int, root: Path) -> list:
    """Train a model of hidden size ``size``, inject several faults one after the other, and return the recoveries.

    ``root``: checkout of this project that trains.
    """
    faults = ",".join(fault(arguments, number) for number in range(arguments.faults))
    steps = first(arguments) + arguments.faults * arguments.spacing
    ways, standbys = (["--ft-checkfree"], 2) if arguments.kind == STAGE else ([], 1)
    command = [sys.executable, "-m", "ft", "run", "--nproc-per-node", str(arguments.ranks), "--standby", str(standbys)]
    script = (arguments.checkout or root) / "pretrain_gpt.py"
    command += ["--run-dir", str(folder), "--inject", faults, str(script)]
    run([*command, *flags(arguments, corpus, steps, size), "--ft-hot-swap", *ways], root)
    history = events.read(folder / "events.jsonl")
    found = recoveries(history)
    if len(found) != arguments.faults:
        raise SystemExit(f"{arguments.faults} faults, {len(found)} recoveries")
    rebuilt = sum(event.name == events.STAGE_REBUILT for event in history)
    if arguments.kind == STAGE and rebuilt < arguments.faults:
        raise SystemExit(f"{arguments.faults} faults, {rebuilt} rebuilt stages")
    return found[1:]


def torchrun(arguments: argparse.Namespace, folder: Path, corpus: str) -> float:
    """Return the seconds from a worker's SIGKILL to the start of the first step after torchrun's restart."""
    folder.mkdir()
    metrics = folder / "metrics.jsonl"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts", "1"]
    command += ["--nproc-per-node", str(arguments.ranks), str(ROOT / "pretrain_gpt.py")]
    command += flags(arguments, corpus, 100_000, arguments.hidden_size)
    command += ["--metrics-file", str(metrics), "--save", str(folder / "save")]
    command += ["--load", str(folder / "save"), "--save-interval", str(FIRST_FAULT)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with open(folder / "log", "w") as log:
        job = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        wait_until((folder / "save" / "latest_checkpointed_iteration.txt").exists, folder)
        before = metrics.stat().st_ino
        killed = time.time()
        psutil.Process(job.pid).children()[1].send_signal(signal.SIGKILL)
        # The restarted run truncates the file to the checkpoint, which creates a new file, and adds its first step.
        wait_until(lambda: metrics.stat().st_ino != before and lines(metrics)[-1]["step"] > FIRST_FAULT, folder)
        return time.time() - killed - lines(metrics)[-1]["step_time_s"]
    finally:
        os.killpg(job.pid, signal.SIGTERM)
        for process in psutil.Process(job.pid).children(recursive=True):
            process.kill()
        job.kill()
        job.wait()


def lines(path: Path) -> list[dict]:
    try:
        return [json.loads(line) for line in path.read_text().splitlines()]
    except (OSError, ValueError):
        return []


def wait_until(true, folder: Path) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not true():
        if time.monotonic() > deadline:
            raise SystemExit(f"torchrun did not get on:\n{(folder / 'log').read_text()[-3000:]}")
        time.sleep(0.005)


def run(command: list[str], root: Path) -> None:
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    if done.returncode:
        raise SystemExit(f"exit code {done.returncode}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")


def result(arguments: argparse.Namespace, ours: dict[tuple[Path, int], list], theirs: list[float]) -> dict:
    mine = side(arguments, ours, ROOT)
    found = {
        "bench": "recovery",
        "ratio": round(statistics.median(theirs) * 1e3 / mine["hot_swap_ms"], 1) if theirs else None,
        **mine,
        "torchrun_s": [round(seconds, 2) for seconds in theirs],
    }
    if arguments.before is not None:
        found["before_it"] = side(arguments, ours, arguments.before.resolve())
    checkout = arguments.checkout.resolve().name if arguments.checkout else None
    return {**found, **vars(arguments), "checkout": checkout}


def side(arguments: argparse.Namespace, ours: dict[tuple[Path, int], list], root: Path) -> dict:
    """Return the figures of one checkout of this project."""
    found = times(ours[root, arguments.hidden_size])
    if arguments.against is not None:
        larger = times(ours[root, arguments.against])
        found |= {"times_as_long": round(larger["hot_swap_ms"] / found["hot_swap_ms"], 2), "larger": larger}
    return found


def times(ours: list) -> dict:
    total = [recovery.total for recovery in ours]
    released = [recovery.phases["detect"] + recovery.phases["release"] for recovery in ours]
    return {
        "hot_swap_ms": median_ms(total),
        "quartiles_ms": [round(1e3 * at) for at in statistics.quantiles(total, n=4)[::2]] if len(total) > 1 else None,
        "hot_swap_all_ms": [round(seconds * 1e3) for seconds in total],
        "released_ms": median_ms(released),
        "released_all_ms": [round(seconds * 1e3) for seconds in released],
        "phases_ms": {name: median_ms([r.phases.get(name, 0.0) for r in ours]) for name in PHASES},
        "groups_rebuilt_of": [ours[0].rebuilt, ours[0].groups],
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
