"""Starts commands in tests; those of ``ft`` are forked from the warm server, as :mod:`harness.commands` describes."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
from nodes import Host

from harness import wire
from harness.commands import has_usual_variables
from harness.warm import shared

REAL = "FT_TESTS_REAL_PROCESSES"
"""Environment variable that lets all commands be started as a user starts them, if it is not empty."""


def start(
    words: list, folder: Path, env: dict[str, str], output: Path, host: Host | None = None
) -> "subprocess.Popen | Started":
    """Start a command in a session of its own.

    Args:
        words: the command line; one that begins with ``python -m ft`` is forked from the warm server.
        folder: working directory.
        env: all environment variables; with FT_TESTS_REAL_PROCESSES=1 nothing is forked.
        output: file that standard output and standard error are appended to.
        host: simulated host that the command runs on; None: this machine.
    """
    words = [str(word) for word in words]
    with open(output, "ab") as out:
        if words[:3] == [sys.executable, "-m", "ft"] and has_usual_variables(env) and not env.get(REAL):
            return Started(words[3:], folder, env, out.fileno(), host)
        begin = subprocess.Popen if host is None else host.start
        return begin(
            words, cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
        )


def run(words: list, folder: Path, env: dict[str, str], limit_s: float) -> subprocess.CompletedProcess:
    """Run a command to its end; ``stdout`` of the result has all of its output as text.

    Raises:
        subprocess.TimeoutExpired: it has not ended after ``limit_s`` seconds; it is killed.
    """
    with tempfile.TemporaryDirectory(prefix="command-") as place:
        output = Path(place) / "output"
        process = start(words, folder, env, output)
        try:
            code = process.wait(limit_s)
        finally:
            process.kill()
            process.wait()
        return subprocess.CompletedProcess(words, code, output.read_text(errors="replace"))


class Started:
    """A command that the warm server has forked; the methods are those of ``subprocess.Popen``."""

    def __init__(self, words: list[str], folder: Path, env: dict[str, str], output: int, host: Host | None):
        self._report, theirs = socket.socketpair()
        request = {"words": words, "cwd": str(folder), "env": env, "hostname": host and host.name}
        with theirs:
            shared().start_command(request, [theirs.fileno(), output, *([host.namespace] if host else [])])
        self._keeper, self.pid = wire.receive(self._report)
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self._listen(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.returncode is None:
            self._listen(None if deadline is None else max(0.0, deadline - time.monotonic()))
            if self.returncode is None and deadline is not None and time.monotonic() >= deadline:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
        return self.returncode

    def send_signal(self, signum: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, signum)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def descendants(self) -> list[int]:
        """Return the living processes of the command, also those in other sessions and those that it left behind."""
        try:
            found = psutil.Process(self._keeper).children(recursive=True)
        except psutil.NoSuchProcess:
            return []
        return [process.pid for process in found]

    def _listen(self, patience_s: float | None) -> None:
        self._report.settimeout(None if patience_s is None else max(patience_s, 0.001))
        try:
            self.returncode = wire.receive(self._report)
        except TimeoutError:
            pass
        except (EOFError, ConnectionError) as gone:
            raise RuntimeError("the warm server, or the keeper of this command, has died") from gone

    def __del__(self):
        self._report.close()
