"""Monitors free disk space for a node agent of ``ft run``: warns at the terminal when the run's directory is full.

The warning has to appear at the terminal, because log files are on that same disk. Where the terminal is a file on that
disk, too, nobody sees the warning; the summary at the end, when there is room again, says what is lacking.
"""

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from ft.base.errors import UserError
from ft.job.messages import Beat

_PERIOD_S = 0.2
_LEAST = 1 << 16


class Room:
    """Monitors the free space on the disk of ``folder``.

    Args:
        folder: the run's directory.
        tell: function that prints a text.
    """

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
