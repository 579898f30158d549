"""Faults of messages: loss, duplication, delay, reordering and corruption, as filters that replace a message to be
sent.

A frame is a chunk of a snapshot (the in-memory state of a rank) on its way to a peer
(``ft.state.transfer.push.Sender.disturb``). A report is a message of a worker to its agent
(``ft.job.agent.link.Link.disturb``).
"""

import threading
import time
from collections.abc import Callable
from typing import Any

from ft.base import events

_REPORT_DELAY_S = 0.3
"""Delay of a report, in seconds."""


class Frames:
    """Filter for the chunks of one snapshot transfer.

    Args:
        kind: kind of the fault, which ends in "frame" or "frames".
        seconds: delay in seconds, for the kind that delays.
    """

    def __init__(self, kind: str, seconds: float | None):
        self._how, self._seconds = kind.partition("-")[0], seconds or 0.0
        self._kept: list[list] = []

    def __call__(self, index: int, total: int, pieces: list) -> list[list]:
        """Return what to send instead of chunk ``index`` of ``total``. ``pieces`` are its head and its bytes."""
        if self._how == "reorder" and total > 1:
            return self._swap(index, pieces)
        if index > 0:
            return [pieces]
        if self._how == "delay":
            time.sleep(self._seconds)
        return {"lose": [], "duplicate": [pieces, pieces], "corrupt": [_damaged(pieces)]}.get(self._how, [pieces])

    def _swap(self, index: int, pieces: list) -> list[list]:
        if index == 0:
            self._kept = [pieces]
            return []
        sent, self._kept = [pieces, *self._kept], []
        return sent


def _damaged(pieces: list) -> list:
    head, chunk = pieces
    chunk = bytearray(chunk)
    chunk[len(chunk) // 2] ^= 1
    return [head, chunk]


class Reports:
    """Filter for the reports of a worker during a number of seconds; thread-safe.

    The report that a fault is injected passes unchanged: it is the record that keeps the fault from happening again.

    Args:
        kind: kind of the fault, which ends in "reports".
        seconds: duration of the fault in seconds.
        clock: returns the time in seconds.
    """

    def __init__(self, kind: str, seconds: float, clock: Callable[[], float] = time.monotonic):
        self._how, self._clock = kind.partition("-")[0], clock
        self._until = clock() + seconds
        self._lock = threading.Lock()
        self._kept: list[Any] = []

    def __call__(self, report: Any) -> list[Any]:
        """Return what to send instead of ``report``."""
        if getattr(report, "event", None) == events.FAULT_INJECTED:
            return [report]
        if self._clock() < self._until:
            if self._how == "lose":
                return []
            if self._how == "duplicate":
                return [report, report]
            if self._how == "delay":
                time.sleep(_REPORT_DELAY_S)
                return [report]
        with self._lock:
            kept, self._kept = self._kept, []
            if self._how == "reorder" and not kept and self._clock() < self._until:
                self._kept = [report]
                return []
        return [report, *kept]
