"""Runs of `ft selftest` in processes of their own."""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pythons
from ft_runs import leftovers

LIMIT_S = 400.0


@dataclass
class Ended:
    """A self-test that has ended."""

    code: int
    output: str
    errors: str
    folder: Path

    @property
    def values(self) -> dict:
        return json.loads(self.output)

    def rows(self) -> dict[str, dict]:
        """Return name of a check -> its JSON values."""
        return {row["name"]: row for row in self.values["checks"]}


def start(folder: Path, *words: str, **environment: str) -> subprocess.Popen:
    """Start `ft selftest --json` with these flags."""
    command = [sys.executable, "-m", "ft", "selftest", "--json", "--run-dir", str(folder), *words]
    environ, pipe = pythons.environment(**environment), subprocess.PIPE
    return subprocess.Popen(command, cwd=pythons.ROOT, env=environ, stdout=pipe, stderr=pipe, text=True)


def end(process: subprocess.Popen, folder: Path) -> Ended:
    """Wait for a self-test; check that it has left no process behind."""
    try:
        output, errors = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        raise AssertionError(f"hangs after {LIMIT_S} s: {process.communicate()}") from None
    assert not leftovers(folder)
    return Ended(process.returncode, output, errors, folder)


def selftest(folder: Path, *words: str, **environment: str) -> Ended:
    """Run `ft selftest --json` from start to end."""
    return end(start(folder, *words, **environment), folder)
