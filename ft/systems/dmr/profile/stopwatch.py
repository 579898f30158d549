"""Clocks that stand still while the profiler writes down what it sees."""

import time
from typing import Protocol

import torch

from ft.systems.dmr.profile.events import Timed


class Stopwatch(Protocol):
    """Times events of one iteration. What lies between ``pause`` and ``go`` does not count."""

    def restart(self) -> None:
        """An iteration begins; the clock goes."""

    def pause(self) -> None: ...

    def go(self) -> None: ...

    def begin(self) -> None:
        """An event begins; the clock goes."""

    def end(self) -> None:
        """It has ended; the clock stands."""

    def times(self) -> list[Timed]:
        """Of all events, in order."""


class HostStopwatch:
    """For operators that have been computed when their call returns."""

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
    """By events on the device's stream. What lies between operators is the host's, which runs ahead of the device where
    that is the one that is busy: it counts as nothing."""

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
    """The one for operators of a device."""
    return DeviceStopwatch() if device.type == "cuda" else HostStopwatch()
