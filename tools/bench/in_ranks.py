"""Common part of benchmarks that measure inside the ranks of a job: starting the ranks, and getting their result. One
script is both the command and what each rank runs.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests/helpers")]

_FOLDER = "BENCH_FOLDER"
_LIMIT_S, _END_S = 600, 30
"""Longest duration of a job, and of its end after SIGTERM, in seconds."""


def main(
    script: str,
    argv: list[str],
    ranks: int,
    measure: Callable[[], None],
    prepare: Callable[[Path], list[str]] = lambda folder: [],
    start: Callable[[int, Path], list[str]] = lambda ranks, folder: launcher(ranks),
) -> int:
    """Run ``script`` with ``argv`` on ``ranks`` processes beside a small corpus, and print what they publish. Inside
    these processes, call ``measure`` instead.

    Args:
        script: path of the benchmark.
        argv: its arguments.
        ranks: number of processes.
        measure: the measurement, which runs in each rank.
        prepare: called with the folder before; the words that it returns are added to ``argv``.
        start: function (number of processes, folder) that returns the start of the command.
    """
    if _FOLDER in os.environ:
        measure()
        return 0
    import small_runs as runs

    from megatron import patches

    patches.apply()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        runs.make_corpus(folder)
        run([*start(ranks, folder), script, *argv, *prepare(folder)], folder)
        print((folder / "result.json").read_text())
    return 0


def launcher(ranks: int) -> list[str]:
    """Return the start of a torchrun command on this machine."""
    return [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--standalone"]


def protected(ranks: int, folder: Path, options: Sequence[str] = ()) -> list[str]:
    """Return the start of an ``ft run`` command, with ``options``, whose run is in a folder below ``folder``."""
    command = [sys.executable, "-m", "ft", "run", "--quiet", "--nproc-per-node", str(ranks), *options]
    return [*command, "--run-dir", str(folder / "run")]


def add_flags_of_replicas(parser: argparse.ArgumentParser, blocks: int) -> None:
    """Add the flags of benchmarks that measure replicas. ``blocks``: default of --blocks."""
    parser.add_argument("--blocks", type=int, default=blocks, help="pairs of blocks that count")
    parser.add_argument("--block-steps", type=int, default=5, help="steps in a block")
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--seq-length", type=int, default=128)
    parser.add_argument("--rank-batch", type=int, default=4, help="samples of a rank in a step")


def run(command: list[str], folder: Path) -> None:
    """Run a command to its end.

    Raises:
        SystemExit: it failed, or took too long; the message has its last output.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", _FOLDER: str(folder), "PYTHONPATH": str(ROOT)}
    log = folder / "console.log"
    with open(log, "wb") as console:
        job = subprocess.Popen(command, env=environment, cwd=ROOT, stdout=console, stderr=subprocess.STDOUT)
    try:
        code = str(job.wait(_LIMIT_S))
    except subprocess.TimeoutExpired:
        code = f"none within {_LIMIT_S} s"
    finally:
        if job.poll() is None:  # also when this process is interrupted
            job.terminate()
            job.wait(_END_S)
    if code != "0":
        texts = [one.read_text(errors="replace")[-3000:] for one in (log, *sorted(folder.glob("run/**/logs/*")))]
        raise SystemExit("\n".join([f"exit code: {code}", *texts]))


# --- in a rank --------------------------------------------------------------------------------------------------------


def folder() -> Path:
    """Return the folder with the corpus, which is deleted after the run."""
    return Path(os.environ[_FOLDER])


def publish(found: dict) -> None:
    """Publish the result, from one of the ranks."""
    (folder() / "result.json").write_text(json.dumps(found))


def protected_job(flags: str, ranks: int, *features: str) -> tuple[Any, Any, Any]:
    """Assemble the reference trainer in a worker of ``ft run``.

    Args:
        flags: its flags, beside those of a small model and the corpus.
        ranks: number of ranks of a world.
        features: those of ``megatron.patches.apply``.

    Returns:
        (the session, the trainer's job, the stack of its protections, which the job does not use yet).
    """
    import small_runs as runs

    from megatron import patches

    patches.apply(*features)
    import ft
    from ft.protection.stack import Protections
    from megatron.ft_trainer.arguments import check, parse
    from megatron.ft_trainer.initialize import init_model_parallel
    from megatron.ft_trainer.pretrain import assemble
    from megatron.ft_trainer.trainer import JobTrainer

    options = parse(f"{runs.BASE} --data-path {folder()}/corpus {flags}")
    layout = check(options, ranks, has_te=False)
    session = ft.attach()
    session.init_process_group(patches.platform().backend)
    init_model_parallel(options.core, layout)
    protections = Protections.of(options.fault_tolerance, os.environ)
    protections.connected(session)
    job = assemble(options, layout, time.monotonic(), protections)
    return session, job, protections.stack(JobTrainer(job))


def alternate(
    sides: Sequence[str], blocks: int, block: Callable[[str], None], warm_up: int = 1
) -> dict[str, list[float]]:
    """Time blocks of steps of several variants in turn, so that a slow phase of the machine slows all of them down.

    Args:
        sides: names of the sides; the order of each turn is the reverse of that before.
        blocks: number of blocks of each side that count.
        block: runs a block of the side that it is given.
        warm_up: number of first blocks of each side that do not count.

    Returns:
        side -> seconds of each of its blocks, from one barrier of the ranks to the next.
    """
    import torch.distributed as dist

    times: dict[str, list[float]] = {side: [] for side in sides}
    for number in range(blocks + warm_up):
        for side in sides if number % 2 else sides[::-1]:
            dist.barrier()
            began = time.perf_counter()
            block(side)
            dist.barrier()
            if number >= warm_up:
                times[side].append(time.perf_counter() - began)
    return times


def median_ms(seconds: Sequence[float]) -> float:
    """Return the median of seconds in milliseconds."""
    return round(1e3 * statistics.median(seconds), 1)


def quartiles(values: Sequence[float], digits: int = 4) -> list[float]:
    """Return the three quartiles, rounded."""
    return [round(each, digits) for each in statistics.quantiles(values, n=4)]
