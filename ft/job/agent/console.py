"""What the person at the terminal sees: the output of two workers, and what the agent has to say."""

import re
import select
import signal
import sys
from collections import deque
from pathlib import Path

_HELD_BACK = 1 << 16
_PIECE = 1024  # characters: in UTF-8 no more bytes than a pipe that takes anything takes at once
_LOOKED_AT = 200
_ERRORS = ("Traceback (most recent call last):", "Fatal Python error:", "error: ")
_WARNING = re.compile(r"\S.*:\d+: \w*Warning: |(\[rank\d+\]:)?\[?W\d{4} ")


def last_lines(path: Path, count: int = 15) -> list[str]:
    """The last lines of a text file, none if it is not there."""
    try:
        with open(path, "rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - (1 << 15)))
            return file.read().decode(errors="replace").rstrip().splitlines()[-count:]
    except OSError:
        return []


def last_words(path: Path, code: int, count: int = 15) -> list[str]:
    """The lines of a worker's log that may say why it ended with exit ``code`` (minus the signal that killed it).

    None of a process that SIGKILL or SIGTERM ended: that comes from outside, and whatever it wrote before is about
    something else. Otherwise the last lines, from the last traceback or fatal error on if there is one among them;
    never warnings of libraries, which tell nothing about the end.
    """
    if code in (-signal.SIGKILL, -signal.SIGTERM):
        return []
    lines = _without_warnings(last_lines(path, _LOOKED_AT))
    begins = [at for at, line in enumerate(lines) if line.startswith(_ERRORS)]
    return lines[begins[-1] if begins else 0 :][-count:]


def _without_warnings(lines: list[str]) -> list[str]:
    """Python's warnings are a line with their place, and mostly an indented one with its source; torch's C++ and glog
    mark theirs with a W."""
    kept, in_warning = [], False
    for line in lines:
        if _WARNING.match(line):
            in_warning = True
        elif not (in_warning and line.startswith("  ")):
            in_warning = False
            kept.append(line)
    return kept


class Console:
    """Standard output and error of the agent, which nobody may be reading: no call but ``close`` waits for that.

    Args:
        quiet: only output of workers and errors.
    """

    def __init__(self, quiet: bool):
        self._quiet = quiet
        self._out, self._err = Outlet("stdout"), Outlet("stderr")
        self._tails: dict[Path, Tail] = {}

    def say(self, text: str) -> None:
        """News of the run."""
        if not self._quiet:
            self._out.write(_named(text))

    def show(self, text: str) -> None:
        """A picture of its own."""
        if not self._quiet:
            self._out.write(text + "\n")

    def write(self, text: str) -> None:
        """Output of workers."""
        self._out.write(text)

    def complain(self, text: str) -> None:
        """Something went wrong."""
        self._err.write(_named(text))

    def follow(self, logs: list[Path], fresh: bool) -> None:
        """From now on the output of these logs is shown, and that of no others.

        Args:
            fresh: from their beginning, not only what comes from now on.
        """
        self.poll(to_the_end=True)
        old = self._tails
        self._tails = {log: old.get(log) or Tail(log, 0 if fresh else None) for log in logs}

    def shows(self, log: Path) -> bool:
        return log in self._tails

    def poll(self, to_the_end: bool = False) -> None:
        """Shows what the logs have grown by, whole lines only unless it is ``to_the_end``."""
        self._err.flush()
        self._out.flush()
        if self._out.is_full and not to_the_end:  # what the logs hold need not be in memory as well
            return
        for tail in self._tails.values():
            if text := tail.take(to_the_end):
                self._out.write(text)

    def close(self) -> None:
        """Waits until all is out: the run is over, and only its output is left."""
        self._err.flush(to_the_end=True)
        self._out.flush(to_the_end=True)


class Outlet:
    """Writes to a standard stream what it takes at once, and the rest later.

    A pager that is not scrolled, or a terminal that is stopped (Ctrl-S), takes nothing. An agent that waited for it
    would not hear its workers, and its node would be given up.

    Args:
        name: stdout or stderr.
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
        """Writes what is taken now, or all."""
        stream = getattr(sys, self._name)
        while self._waiting and (to_the_end or _takes(stream)):
            stream.write(self._waiting.popleft())
            stream.flush()


def _takes(stream) -> bool:
    try:
        poller = select.poll()
        poller.register(stream.fileno(), select.POLLOUT)
        return bool(poller.poll(0))
    except (OSError, ValueError):  # it has no descriptor: nothing to wait for
        return True


def _named(text: str) -> str:
    return "".join(f"ft: {line}\n" for line in text.splitlines())


class Tail:
    """Reads what a file grows by.

    Args:
        start: byte to begin at, None: its present end.
    """

    def __init__(self, path: Path, start: int | None):
        self._path = path
        self._position = start if start is not None else (path.stat().st_size if path.exists() else 0)

    def take(self, to_the_end: bool) -> str:
        """What has come since, up to the last end of a line (or of a progress bar's picture)."""
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
