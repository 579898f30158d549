"""Stopwatches that can be paused while the profiler records what it observes."""

import time
from typing import Protocol

import torch

from ft.systems.dmr.profile.events import Timed


class Stopwatch(Protocol):
    """Times the events of one iteration. Time between ``pause`` and ``go`` does not count."""

    def restart(self) -> None:
        """Begin an iteration and run."""

    def pause(self) -> None: ...

    def go(self) -> None: ...

    def begin(self) -> None:
        """Begin an event and run."""

    def end(self) -> None:
        """End the event and pause."""

    def times(self) -> list[Timed]:
        """Return the times of all events, in order."""


class HostStopwatch:
    """Host clock, for operators that have been computed when their call returns."""

    def restart(self) -> None:
        self._counted, self._events, self._last = 0.0, [], 0.0
        self._since = time.perf_counter()

    def pause(self) -> None:
        self._counted += time.perf_counter() - self._since

    def go(self) -> None:
        self._since = time.perf_counter()

    def begin(self) -> None:
        self._began = self._counted
        self._since = time.perf_counter()

    def end(self) -> None:
        self.pause()
        self._events.append((self._began - self._last, self._counted - self._began))
        self._last = self._counted

    def times(self) -> list[Timed]:
        return [Timed(gap * 1e6, own * 1e6) for gap, own in self._events]


class DeviceStopwatch:
    """Device clock that records CUDA events on the stream. The time between operators counts as zero: it is spent by
    the host, which runs ahead of a busy device."""

    def restart(self) -> None:
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def pause(self) -> None:
        pass

    def go(self) -> None:
        pass

    def begin(self) -> None:
        self._began = torch.cuda.Event(enable_timing=True)
        self._began.record()

    def end(self) -> None:
        ended = torch.cuda.Event(enable_timing=True)
        ended.record()
        self._events.append((self._began, ended))

    def times(self) -> list[Timed]:
        torch.cuda.synchronize()
        return [Timed(0.0, began.elapsed_time(ended) * 1e3) for began, ended in self._events]


def stopwatch(device: torch.device) -> Stopwatch:
    """Return the stopwatch for operators of a device."""
    return DeviceStopwatch() if device.type == "cuda" else HostStopwatch()
