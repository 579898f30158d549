"""What a node agent prints at the terminal of ``ft run``: recoveries that are over, causes of crashes, and a full disk.

The warning of a full disk has to appear at the terminal, because log files are on that same disk. Where the terminal is
a file on that disk, too, nobody sees the warning; the summary at the end, when there is room again, says what is
lacking.
"""

import os
import threading
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from ft.base import events
from ft.base.errors import UserError
from ft.job.messages import Beat

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
        """Print summaries on this node from now on, reading the event log at ``path``."""
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


_PERIOD_S = 0.2
_LEAST = 1 << 16


class Room:
    """Monitors the free space on the disk of ``folder``."""

    def __init__(self, folder: Path, tell: Callable[[str], None]):
        self._folder, self._tell = folder, tell
        self._next = 0.0
        self._step = 0
        self._is_full = self._was_full = False

    def heard(self, beats: Mapping[str, Beat]) -> None:
        """Record the highest step in the workers' heartbeats."""
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
