"""Python processes that import the packages of this repository."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIMIT_S = 180.0


def environment(**more: str) -> dict[str, str]:
    """Return the environment variables of such a process."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **more}


def python(*words: object, folder: Path = ROOT, limit_s: float = LIMIT_S, **more: str) -> subprocess.CompletedProcess:
    """Run Python with these words to its end, without looking at its exit code; its output is text.

    Args:
        words: what follows the interpreter on the command line.
        folder: its working directory.
        limit_s: seconds after which it is killed, and ``subprocess.TimeoutExpired`` raised.
        more: environment variables.
    """
    return subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=folder,
        env=environment(**more),
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
    )
