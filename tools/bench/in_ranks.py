"""Common part of benchmarks that measure inside the ranks of one job: starting the ranks, and getting their result."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests/helpers")]

_FOLDER = "BENCH_FOLDER"


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


def protected(ranks: int, folder: Path) -> list[str]:
    """Return the start of an ``ft run`` command whose run is in a folder below ``folder``."""
    command = [sys.executable, "-m", "ft", "run", "--quiet", "--nproc-per-node", str(ranks)]
    return [*command, "--run-dir", str(folder / "run")]


def run(command: list[str], folder: Path) -> None:
    """Run a command to its end.

    Raises:
        SystemExit: it failed; the message has its last output.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", _FOLDER: str(folder), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"exit code {done.returncode}:\n{done.stdout[-4000:]}{done.stderr[-4000:]}")


def folder() -> Path:
    """Return the folder with the corpus. Call it in a rank."""
    return Path(os.environ[_FOLDER])


def publish(found: dict) -> None:
    """Publish the result. Call it in one of the ranks."""
    (folder() / "result.json").write_text(json.dumps(found))
