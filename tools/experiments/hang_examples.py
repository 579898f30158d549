"""Makes the examples of docs/diagnosis.md: one real hang of each kind, what ft diagnose hang says, and what was done.

    python tools/experiments/hang_examples.py --into FOLDER [--only KIND]      runs, a folder each
    python tools/experiments/hang_examples.py --report --into FOLDER           results/hang_examples.txt, examples/hangs

Each is a run of 8 workers (TP2 x PP2 x DP2, a standby) of ``pretrain_gpt.py``: with a fault of ft run --inject, with a
bug in metrics that the user's script adds (``hang_examples_gpt.py``), or on hosts of a laboratory
(``tests/helpers/nodes``; needs root) of which one loses its power or has a slow connection. For a hang the look is read
that the run takes by itself before a limit passes. A lost host is replaced within a second or two, so there a person
asks, and the limit is raised to give him the time.
"""

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RESULT, PICTURES = ROOT / "tools/experiments/results/hang_examples.txt", ROOT / "examples/hangs"
LIMITS = "stall_s: 3\nsilent_s: 8\ncollective_s: 4\nstart_s: 60\n"
LIMIT_S, PORT = 180.0, 29419
MODEL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --micro-batch-size 2 "
    "--global-batch-size 8 --lr 1e-2 --position-embedding-type rope --untie-embeddings-and-output-weights "
    "--padded-vocab-size 512 --split 90,10,0 --eval-iters 0 --log-interval 1 --num-workers 0 --mock-data "
    "--use-distributed-optimizer --ft-hot-swap "
)
FOUR = "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2 "
STAGES = "--pipeline-model-parallel-size 4 "
SLOW, EVICT = "slow@step=5:rank=5:factor=4:for=600s", FOUR + "--ft-evict-stragglers 2 "


@dataclass(frozen=True)
class Example:
    """One example.

    Attributes:
        what: what goes wrong.
        inject: fault of ft run --inject.
        bug: bug of ``hang_examples_gpt.py``.
        flags: Megatron's flags besides those of the model.
        hosts: number of hosts; 1: this machine.
        looks: number of looks that are asked for while the run goes on; 0: the one that the run takes by itself.
    """

    what: str
    inject: str = ""
    bug: str = ""
    flags: str = FOUR
    hosts: int = 1
    looks: int = 0


EXAMPLES = {
    "stopped": Example("the process of rank 2 is stopped by a signal", inject="hang@step=8:rank=2"),
    "dead": Example("the host of ranks 4 to 7 loses its power", hosts=2),
    "busy": Example("the training thread of rank 5 sleeps in code of its own", inject="stall@step=8:rank=5"),
    "missing-call": Example("rank 5 leaves out the metrics' all-reduce in one step", bug="missing-call"),
    "mismatch": Example("rank 7 broadcasts where the others gather", bug="mismatch"),
    "unmatched-message": Example("rank 6 sends where it should receive", bug="unmatched-message"),
    "cycle": Example("rank 3 takes two groups in the other order", bug="cycle"),
    "slow-rank": Example("rank 5 computes four times as long", inject=SLOW, flags=EVICT, looks=12),
    "slow-link": Example("the packets from and to rank 1's host take 50 ms", hosts=4, flags=STAGES, looks=40),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--into", type=Path, required=True)
    parser.add_argument("--only", choices=EXAMPLES, action="append")
    parser.add_argument("--report", action="store_true")
    given = parser.parse_args()
    if given.report:
        report(given.into)
        return 0
    for kind in given.only or EXAMPLES:
        folder = given.into.absolute() / kind
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        make(kind, EXAMPLES[kind], folder)
        print(kind, (folder / "said.txt").read_text().splitlines()[1:4], flush=True)
    return 0


def make(kind: str, example: Example, folder: Path) -> None:
    """Run an example; keep what ft diagnose hang says of it, its picture, and what the run has done."""
    (folder / "limits.yaml").write_text(LIMITS + ("agent_lost_s: 7\n" if example.hosts == 2 else ""))
    run = folder / "run"
    with agents(example, folder) as (first, lose):
        if example.looks:
            wait_for(lambda: step(run) >= 6, first)
            said = diagnose(run, folder, "--looks", str(example.looks), "--every", "0.2")
            if example.flags == EVICT:
                wait_for(lambda: has_recovered(folder), first)
        else:
            if lose is not None:
                wait_for(lambda: step(run) >= 8, first)
                lose()
                time.sleep(1)
                (run / "looks").mkdir(exist_ok=True)
                (run / "looks/wanted").touch()
            wait_for(lambda: (run / "looks").is_dir() and any((run / "looks").glob("*/*.json")), first)
            with contextlib.suppress(TimeoutError):
                wait_for(lambda: has_recovered(folder), first)
            said = diagnose(run, folder, "--look", "1")
    (folder / "said.txt").write_text(said)
    (folder / "done.txt").write_text(what_was_done(folder / "out-0"))


@contextlib.contextmanager
def agents(example: Example, folder: Path) -> Iterator[tuple[subprocess.Popen, object]]:
    """Start the agents of a run and end them; yield (the first one, function that makes a host lose its power)."""
    with contextlib.ExitStack() as stack:
        popens, where, lose = [subprocess.Popen], [[]], None
        if example.hosts > 1:
            sys.path[:0] = [str(ROOT / "tests/helpers")]
            from nodes import Lab

            hosts = stack.enter_context(Lab(example.hosts)).hosts
            popens = [host.start for host in hosts]
            shared = ["--nnodes", str(len(hosts)), "--rdzv-endpoint", f"{hosts[0].address}:{PORT}"]
            where = [[*shared, "--node-rank", str(host.index)] for host in hosts]
            lose = hosts[-1].lose_power if not example.looks else None
            if example.looks:
                hosts[1].degrade(delay_s=0.05)
        started = [_start(example, folder, *one) for one in zip(range(len(popens)), popens, where, strict=True)]
        try:
            yield started[0], lose
        finally:
            for process in started:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, 9)
                process.wait()


def _start(example: Example, folder: Path, number: int, popen, where: list[str]) -> subprocess.Popen:
    script = str(Path(__file__).with_name("hang_examples_gpt.py")) if example.bug else str(ROOT / "pretrain_gpt.py")
    flags = MODEL + example.flags + "--train-iters 100000"
    ranks = 4 if example.hosts == 4 else 8
    command = [sys.executable, "-m", "ft", "run", "--nproc-per-node", str(ranks // example.hosts), "--standby", "1"]
    command += ["--run-dir", str(folder / "run"), "--limits", str(folder / "limits.yaml"), *where]
    command += ["--inject", example.inject] if example.inject else []
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "HANG_EXAMPLE": example.bug}
    with open(folder / f"out-{number}", "w") as log:
        how = {"stdout": log, "stderr": subprocess.STDOUT, "env": environment, "cwd": ROOT}
        return popen([*command, script, *flags.split()], start_new_session=True, **how)


def wait_for(true, process: subprocess.Popen) -> None:
    """Wait until ``true()``; raise TimeoutError if that takes too long or the process has ended before."""
    deadline = time.monotonic() + LIMIT_S
    while not true():
        if time.monotonic() > deadline or process.poll() is not None:
            raise TimeoutError("the run has ended, or does not get there")
        time.sleep(0.1)


def has_recovered(folder: Path) -> bool:
    """Return whether the run has said what its first recovery was."""
    return "   state " in (folder / "out-0").read_text()


def step(run: Path) -> int:
    """Return the number of steps that a run has taken."""
    return sum(1 for _ in open(run / "metrics.jsonl")) if (run / "metrics.jsonl").exists() else 0


def diagnose(run: Path, folder: Path, *more: str) -> str:
    command = [sys.executable, "-m", "ft", "diagnose", "hang", str(run), "--picture", str(folder / "picture.png")]
    command += more
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


def what_was_done(log: Path) -> str:
    """Return the block of the first recovery, without the times of its phases."""
    _, title, after = log.read_text().partition("-- recovery ")
    return title + after.partition("   release ")[0] if title else "nothing: the run goes on\n"


def report(folder: Path) -> None:
    """Write all that was said into one file, and copy the pictures."""
    PICTURES.mkdir(exist_ok=True)
    parts = ["python tools/experiments/hang_examples.py --report --into FOLDER"]
    for kind, example in EXAMPLES.items():
        said, done = ((folder / kind / name).read_text().rstrip() for name in ("said.txt", "done.txt"))
        parts += [f"== {kind}: {example.what}", said, "what was done", done]
        shutil.copy(folder / kind / "picture.png", PICTURES / f"{kind}.png")
    RESULT.write_text("\n\n".join(parts).replace(str(folder.absolute()), "FOLDER") + "\n")


if __name__ == "__main__":
    sys.exit(main())
