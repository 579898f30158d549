"""Commands, mainly ``ft run``, started as a user starts them: each has a deadline and must leave no process behind."""

import contextlib
import os
import subprocess
import sys
import time
import uuid
from pathlib import Path

from harness import processes, started

ROOT = Path(__file__).parent.parent.parent
DEADLINE_S = 180


class Command:
    """A command that runs in its own session in ``folder``, with all processes that it starts."""

    def __init__(self, folder: Path, words: list[str], **environ: str):
        self.mark, self.output, self.folder = uuid.uuid4().hex, folder / f"{uuid.uuid4().hex[:6]}.out", folder
        environ = {**os.environ, "PYTHONPATH": str(ROOT), "FT_TEST_MARK": self.mark, **environ}
        self.process = started.start(words, folder, environ, self.output)

    def wait(self, timeout: float = DEADLINE_S) -> int:
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"no end after {timeout} s:\n{self.text()}") from None

    def text(self) -> str:
        return self.output.read_text()

    def wait_for(self, true, what: str):
        """Wait until ``true()`` is true; return its value."""
        deadline = time.monotonic() + DEADLINE_S
        while not (found := true()):
            assert self.process.poll() is None, f"ended before {what}:\n{self.text()}"
            assert time.monotonic() < deadline, f"{what} did not come:\n{self.text()}"
            time.sleep(0.01)
        return found

    def wait_for_log(self, worker: str, text: str) -> None:
        log = self.folder / "run" / "logs" / f"{worker}.log"
        self.wait_for(lambda: log.exists() and text in log.read_text(), f"{text!r} in {worker}.log")

    def left(self) -> list[int]:
        """Return the living processes that the command has started, also those that have left its session."""
        if isinstance(self.process, started.Started):
            return self.process.descendants()
        found = []
        for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
            try:
                marked = self.mark.encode() in Path(f"/proc/{pid}/environ").read_bytes()
            except (OSError, ProcessLookupError):
                continue
            if marked and processes.runs(pid):
                found.append(pid)
        return found

    def named(self, name: str) -> list[int]:
        """Return the command's processes whose process name is ``name``."""
        names = {}
        for pid in self.left():
            with contextlib.suppress(OSError):
                names[pid] = Path(f"/proc/{pid}/comm").read_text().strip()
        return [pid for pid, found in names.items() if found == name]

    def pid_of(self, name: str) -> int:
        """Return the command's only process whose process name is ``name``.

        A process that was just forked still has the name of its parent: wait until one is left.
        """
        self.wait_for(lambda: len(self.named(name)) == 1, f"one process named {name}")
        (pid,) = self.named(name)
        return pid

    def close(self) -> None:
        """Fail if the command or a process of it still runs shortly after its end; kill what is left."""
        deadline = time.monotonic() + 120
        while (left := self.left()) and self.process.poll() is not None and time.monotonic() < deadline:
            time.sleep(0.02)
        described = [processes.describe(pid) for pid in left]
        still_runs = self.process.poll() is None
        processes.end(left)
        self.process.wait()
        assert not described or still_runs, f"left behind: {described}"


def ft(*words, folder: Path = ROOT) -> subprocess.CompletedProcess:
    """Run a command of ``ft`` to its end; ``stdout`` of the result has all of its output as text."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    return started.run([sys.executable, "-m", "ft", *words], folder, environ, DEADLINE_S)


class Job(Command):
    """One ``ft run``. ``command``: all words after ``ft run``. ``entry``: how Python starts ``ft``."""

    def __init__(self, folder: Path, command: list, entry: tuple[str, ...] = ("-m", "ft"), **environ: str):
        super().__init__(folder, [sys.executable, *entry, "run", *map(str, command)], **environ)
