"""Common part of benchmarks that measure inside a run of replicas: one script is both the command and its workers."""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
LIMIT_S = 230


def add_flags(parser: argparse.ArgumentParser, blocks: int) -> None:
    """Add the flags that all of these benchmarks have. ``blocks``: default of --blocks."""
    parser.add_argument("--blocks", type=int, default=blocks, help="pairs of blocks that count")
    parser.add_argument("--block-steps", type=int, default=5, help="steps in a block")
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--seq-length", type=int, default=128)
    parser.add_argument("--rank-batch", type=int, default=4, help="samples of a rank in a step")


def main(script: str, argv: list[str], options: list[str], measure: Callable[[], None]) -> int:
    """Call ``measure`` in a worker; otherwise run ``script`` with ``argv`` in a run of its own and print its result.

    Args:
        script: path of the benchmark.
        argv: its arguments.
        options: options of ``ft run``.
        measure: the measurement; one worker of it calls ``publish``.
    """
    if "FT_AGENT" in os.environ:
        measure()
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # cleans up on SIGTERM
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(_run(script, argv, options, Path(folder))))
    return 0


def folder() -> Path:
    """Return the folder with the corpus, which is deleted after the run. Call it in a worker."""
    return Path(os.environ["BENCH_FOLDER"])


def publish(result: dict) -> None:
    """Publish the result. Call it in one worker."""
    temporary = folder() / "result.part"
    temporary.write_text(json.dumps(result))
    temporary.rename(temporary.with_name("result.json"))


def _run(script: str, argv: list[str], options: list[str], here: Path) -> dict:
    import small_runs as runs

    from megatron import patches

    patches.apply()
    runs.make_corpus(here)
    command = [sys.executable, "-m", "ft", "run", "--quiet", *options, "--run-dir", str(here / "run"), script, *argv]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "BENCH_FOLDER": str(here), "PYTHONPATH": str(ROOT)}
    log = here / "console.log"
    with open(log, "wb") as console:
        job = subprocess.Popen(command, env=environment, cwd=ROOT, stdout=console, stderr=subprocess.STDOUT)
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            job.wait(LIMIT_S)
    finally:
        if job.poll() is None:
            job.terminate()
            job.wait(30)
    found = here / "result.json"
    if job.returncode or not found.exists():
        logs = [log.read_text(errors="replace")[-1500:] for log in sorted(here.glob("run/replica-*/logs/*"))]
        raise SystemExit("\n".join([f"exit code {job.returncode}", log.read_text(errors="replace")[-3000:], *logs]))
    return json.loads(found.read_text())
