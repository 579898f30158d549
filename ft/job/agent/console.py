"""Terminal output of a node agent of ``ft run``: the agent's own messages, and the output of selected workers.

All workers write to log files; the agent copies the logs of the workers with the first and the last rank to the
terminal.
"""

import re
import select
import signal
import sys
from collections import deque
from pathlib import Path
from typing import Any

from ft.base import output
from ft.base.errors import plain

_HELD_BACK = 1 << 16
_PIECE = 1024  # characters; in UTF-8 at most 4096 bytes, which a pipe that is ready for writing accepts at once
_LOOKED_AT = 200
_ERRORS = ("Traceback (most recent call last):", "Fatal Python error:", "error: ")
_WARNING = re.compile(r"\S.*:\d+: \w*Warning: |(\[rank\d+\]:)?\[?W\d{4} ")


def last_lines(path: Path, count: int = 15) -> list[str]:
    """Return the last ``count`` lines of a text file; an empty list if it cannot be read."""
    try:
        with open(path, "rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - (1 << 15)))
            return file.read().decode(errors="replace").rstrip().splitlines()[-count:]
    except OSError:
        return []


def last_words(path: Path, code: int, count: int = 15) -> list[str]:
    """Return the lines of a worker's log that may explain its exit code (negative: the signal that killed it).

    For a process that SIGKILL or SIGTERM ended, return no lines: the signal came from outside, so the log does not
    explain it. Otherwise return the last lines, starting at the last traceback or fatal error if they contain one.
    Warnings of libraries are left out.
    """
    if code in (-signal.SIGKILL, -signal.SIGTERM):
        return []
    lines = _without_warnings(last_lines(path, _LOOKED_AT))
    begins = [at for at, line in enumerate(lines) if line.startswith(_ERRORS)]
    return lines[begins[-1] if begins else 0 :][-count:]


def _without_warnings(lines: list[str]) -> list[str]:
    """Remove warnings of Python, torch and glog.

    A Python warning is a line with file and line number, mostly followed by an indented source line; warnings of
    torch's C++ code and of glog begin with a W.
    """
    kept, in_warning = [], False
    for line in lines:
        if _WARNING.match(line):
            in_warning = True
        elif not (in_warning and line.startswith("  ")):
            in_warning = False
            kept.append(line)
    return kept


class Console:
    """Standard output and error of the agent. No method except ``close`` waits for the reader of these streams.

    Args:
        quiet: print only the output of workers, and errors; ``say`` and ``show`` print nothing.
    """

    def __init__(self, quiet: bool):
        self._quiet = quiet
        self._out, self._err = Outlet("stdout"), Outlet("stderr")
        self._tails: dict[Path, Tail] = {}

    def say(self, text: str) -> None:
        """Print a message about the run, each line with the prefix "ft: "."""
        if not self._quiet:
            self._out.write(_named(text))

    def show(self, text: str) -> None:
        """Print a text as it is, without a prefix."""
        if not self._quiet:
            self._out.write(text + "\n")

    def write(self, text: str) -> None:
        """Print output of workers."""
        self._out.write(text)

    def complain(self, text: str) -> None:
        """Print an error message to standard error."""
        self._err.write(_named(text))

    def follow(self, logs: list[Path], fresh: bool) -> None:
        """From now on show the output of these logs, and of no others.

        Args:
            fresh: show them from their beginning, instead of only what is written from now on.
        """
        self.poll(to_the_end=True)
        old = self._tails
        self._tails = {log: old.get(log) or Tail(log, 0 if fresh else None) for log in logs}

    def shows(self, log: Path) -> bool:
        return log in self._tails

    def poll(self, to_the_end: bool = False) -> None:
        """Print what was appended to the followed logs: whole lines only, unless ``to_the_end``."""
        self._err.flush()
        self._out.flush()
        if self._out.is_full and not to_the_end:  # read no more: what is in the log files need not wait in memory too
            return
        for tail in self._tails.values():
            if text := tail.take(to_the_end):
                self._out.write(text)

    def close(self) -> None:
        """Wait until all output is written, and say what was lost. Call it when the run is over."""
        self._err.flush(to_the_end=True)
        self._out.flush(to_the_end=True)
        for broken, other in (("stdout", self._err), ("stderr", self._out)):
            if lost := output.take_losses(broken):
                other.write(_named(lost))
                other.flush(to_the_end=True)


class Outlet:
    """Writes to a standard stream without blocking; data that the stream does not accept waits in memory.

    A pager that is not scrolled or a stopped terminal (Ctrl-S) accepts no data. If the agent blocked on such a stream,
    it would send no heartbeats, and its node would be declared lost. What a full disk or a closed pipe does not accept
    is lost (:mod:`ft.base.output`).

    Args:
        name: name of the stream in ``sys``, "stdout" or "stderr".
    """

    def __init__(self, name: str):
        self._name = name
        self._waiting: deque[str] = deque()

    @property
    def is_full(self) -> bool:
        return bool(self._waiting)

    def write(self, text: str) -> None:
        self._waiting += [text[at : at + _PIECE] for at in range(0, len(text), _PIECE)]
        self.flush()

    def flush(self, to_the_end: bool = False) -> None:
        """Write what the stream accepts now; with ``to_the_end``, write all, even if that blocks."""
        stream = getattr(sys, self._name)
        while self._waiting and (to_the_end or _takes(stream)):
            stream.write(self._waiting.popleft())
            stream.flush()


def _takes(stream: Any) -> bool:
    try:
        poller = select.poll()
        poller.register(stream.fileno(), select.POLLOUT)
        return bool(poller.poll(0))
    except (OSError, ValueError):  # the stream has no descriptor and never blocks
        return True


def _named(text: str) -> str:
    return "".join(f"ft: {plain(line)}\n" for line in text.splitlines())


class Tail:
    """Reads what is appended to a file.

    Args:
        start: byte offset to begin at, None for the file's present end.
    """

    def __init__(self, path: Path, start: int | None):
        self._path = path
        self._position = start if start is not None else (path.stat().st_size if path.exists() else 0)

    def take(self, to_the_end: bool) -> str:
        """Return the text appended since the last call, up to the last newline or carriage return.

        With ``to_the_end``, an incomplete last line is included.
        """
        try:
            if self._path.stat().st_size <= self._position:
                return ""
            with open(self._path, "rb") as file:
                file.seek(self._position)
                data = file.read()
        except OSError:
            return ""
        if not to_the_end and len(data) < _HELD_BACK:
            data = data[: max(data.rfind(b"\n"), data.rfind(b"\r")) + 1]
        self._position += len(data)
        return data.decode(errors="replace")
