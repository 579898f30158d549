"""What a node agent prints at the terminal of ``ft run``: its own messages, the output of selected workers, recoveries
that are over, causes of crashes, and a full disk.

All workers write to log files; the agent copies the logs of the workers with the first and the last rank to the
terminal. The warning of a full disk has to appear there, because log files are on that same disk. Where the terminal is
a file on that disk, too, nobody sees the warning; the summary at the end, when there is room again, says what is
lacking.
"""

import os
import re
import select
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from ft.base import events, output
from ft.base.errors import UserError, plain
from ft.job.messages import Beat

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


# --- announcements ----------------------------------------------------------------------------------------------------


_PERIOD_S = 0.2
_WRITE_S = 10.0
"""Seconds for which the end of the run waits for the summaries that are being written."""


class RecoveryNews:
    """Prints a summary of each recovery, built from the event log that the control plane writes.

    A thread writes each summary, because the agent's own thread has to stay free: the cause of a hang is searched for
    in what all ranks say. ``poll`` prints the summaries that are written, in the order of the recoveries.

    Args:
        path: the run's event log (``events.jsonl``); None if another node prints the summaries.
    """

    def __init__(self, path: Path | None, tell: Callable[[str], None]):
        self._path, self._tell = path, tell
        self._awaited: set[int] = set()
        self._seen = 0
        self._size = -1
        self._written: list[_Summary] = []
        self._shown = ""
        self._next = 0.0

    def adopt(self, path: Path) -> None:
        """From now on print the summaries of recoveries on this node, from the event log at ``path``."""
        self._path = self._path or path

    def expect(self, epoch: int) -> None:
        """Record that a recovery is in progress that ends when epoch ``epoch`` or a later one resumes training."""
        if self._path is None:
            return
        self.poll(hurry=True)
        if not self._awaited:
            self._seen = len(events.read(self._path))
        self._awaited.add(epoch)

    def poll(self, hurry: bool = False) -> None:
        """Print the summaries that are written, and begin those of the recoveries that have ended since the last call.

        Reads the log at most every ``_PERIOD_S`` seconds, unless ``hurry``.
        """
        while self._written and not self._written[0].is_alive():
            self._show(self._written.pop(0).text)
        now = time.monotonic()
        if self._path is None or not self._awaited or (now < self._next and not hurry):
            return
        self._next = now + _PERIOD_S
        size = self._path.stat().st_size if self._path.exists() else -1
        if size == self._size:
            return
        self._size = size
        history = events.read(self._path)
        for index in range(self._seen, len(history)):
            event = history[index]
            if event.name != events.RESUMED or event.epoch is None or not self._awaited:
                continue
            if event.epoch >= min(self._awaited):
                self._awaited = set(filter(event.epoch.__lt__, self._awaited))
                self._tell_of(history[: index + 1])
        self._seen = len(history)

    def finish(self) -> None:
        """At the end of the run, begin the summary of a recovery that has not finished."""
        self.poll(hurry=True)
        if self._awaited and self._path is not None:
            self._awaited = set()
            self._tell_of(events.read(self._path))

    def close(self) -> None:
        """Print what is left, and wait a moment until it is written."""
        until = time.monotonic() + _WRITE_S
        for summary in self._written:
            summary.join(max(0.0, until - time.monotonic()))
        self.poll()

    def _tell_of(self, history: list[events.Event]) -> None:
        assert self._path is not None, "recoveries are awaited only where there is an event log"
        self._written.append(_Summary(history, self._path.parent))
        self._written[-1].start()

    def _show(self, text: str) -> None:
        if text and text != self._shown:
            self._shown = text
            self._tell(text)


class _Summary(threading.Thread):
    """Writes the summary of the last recovery of a history."""

    def __init__(self, history: list[events.Event], run: Path):
        super().__init__(name="ft-summary", daemon=True)
        self._history, self._run_dir = history, run
        self.text = ""

    def run(self) -> None:
        from ft.record.block import recovery_block

        self.text = recovery_block(self._history, self._run_dir)


def cause_of_crash(run_dir: Path, told: Collection[str]) -> str:
    """Return the first cause of the crash that has ended the run, "" if the terminal says everything already.

    Args:
        told: names of the workers whose last words are at the terminal.
    """
    from ft.faults import first_cause as causes
    from ft.record import crash

    try:
        found = crash.read(run_dir).found
    except (UserError, OSError, ValueError):  # the run's end must not depend on a folder that cannot be read any more
        return ""
    if found is None or found.cause.kind in (causes.TOLD, causes.ENDED):
        return ""
    is_told = len(found.cause.errors) == 1 and found.cause.first.worker in told
    is_all = not found.others and all(group.kind == causes.ENDED for group in found.consequences)
    return "" if is_told and is_all and not found.earlier else crash.as_text(found, told)


_LEAST = 1 << 16


class Room:
    """Monitors the free space on the disk of ``folder``."""

    def __init__(self, folder: Path, tell: Callable[[str], None]):
        self._folder, self._tell = folder, tell
        self._next = 0.0
        self._step = 0
        self._is_full = self._was_full = False

    def heard(self, beats: Mapping[str, Beat]) -> None:
        """Remember the highest step of all heartbeats: the files of the run should reach it."""
        self._step = max([self._step, *(beat.step for beat in beats.values())])

    def poll(self) -> None:
        """Warn when the disk becomes full, and print a message when it has space again."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + _PERIOD_S
        try:
            disk = os.statvfs(self._folder)
        except OSError:
            return
        is_full = disk.f_bavail * disk.f_frsize < _LEAST
        if is_full and not self._is_full:
            self._tell(
                f"the disk of {self._folder} is full: training goes on, lines of metrics, events and the journal wait "
                "in memory, and logs lose what does not fit; make room there"
            )
        elif self._is_full and not is_full:
            self._tell(f"the disk of {self._folder} has room again: lines that waited are written")
        self._is_full, self._was_full = is_full, self._was_full or is_full

    def close(self) -> None:
        """At the end of the run, print which records the run's files lack, if the disk was full at some time."""
        if not self._was_full:
            return
        from ft.record import run as records
        from ft.record.run import load

        try:
            lacking = records.lacking(load(self._folder), self._step)
        except UserError as error:
            lacking = [str(error)]
        for text in lacking or ["no line is damaged and no step is missing"]:
            self._tell(f"{self._folder}: {text}")
