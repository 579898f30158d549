"""Messages that are lost, doubled, late, out of turn or damaged: what is sent in place of one.

Frames are a snapshot's chunks on their way to a peer (``ft.state.snapshot.wire.Wire.disturb``), reports what a worker
tells its agent (``ft.job.agent.link.Link.disturb``).
"""

import threading
import time
from collections.abc import Callable
from typing import Any

_REPORT_DELAY_S = 0.3


class Frames:
    """One transfer's chunks. ``kind``: of the table, ending in "frame" or "frames"; ``seconds``: of a delay."""

    def __init__(self, kind: str, seconds: float | None):
        self._how, self._seconds = kind.partition("-")[0], seconds or 0.0
        self._kept: list[list] = []

    def __call__(self, index: int, total: int, pieces: list) -> list[list]:
        """What is sent for the chunk ``index`` of ``total``; ``pieces``: its head and its bytes."""
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
    """A worker's reports for ``seconds``; safe from any thread. ``kind``: of the table, ending in "reports"."""

    def __init__(self, kind: str, seconds: float, clock: Callable[[], float] = time.monotonic):
        self._how, self._clock = kind.partition("-")[0], clock
        self._until = clock() + seconds
        self._lock = threading.Lock()
        self._kept: list[Any] = []

    def __call__(self, report: Any) -> list[Any]:
        """What is sent for ``report``."""
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
