"""Measure the durations of operators and waits for the DMR profiler, without the time of the profiler itself."""

import time
from typing import Protocol

import torch

from ft.systems.dmr.profile.events import Timed


class Stopwatch(Protocol):
    """Measures the durations of the events (operators and waits) of one iteration. Time between ``pause`` and ``go``
    does not count."""

    def restart(self) -> None:
        """Begin an iteration: forget all events, and start counting time."""

    def pause(self) -> None: ...

    def go(self) -> None: ...

    def begin(self) -> None:
        """Begin an event, and start counting time."""

    def end(self) -> None:
        """End the event, and stop counting time."""

    def times(self) -> list[Timed]:
        """Return the times of all events, in order."""


class HostStopwatch:
    """Stopwatch by the host's clock, for CPUs, on which an operator has been computed when its call returns."""

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
    """Stopwatch by CUDA events on the current stream. The time between two operators counts as zero, because it is time
    of the host, which runs ahead of a busy device."""

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
