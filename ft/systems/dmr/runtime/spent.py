"""Tell how much of a window deferred verifications have used, for DMR (SpareTrain, Method 4).

DMR (dual modular redundancy) executes deferred operators in windows, times in which a rank waits for communication. On
an accelerator an operator that was launched has not been computed yet: the host's clock says nothing, and to ask the
device would mean to wait for it.
"""

import math
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

_WEIGHT = 0.25
"""Weight of a new window in the moving average of measured over planned time."""
_LEAST = 0.01
"""Least such average: events are too coarse for shorter times."""


class Spent(Protocol):
    """Tells what still fits into a window."""

    def restart(self) -> None:
        """Begin an iteration."""

    def opens(self, lasts_us: float) -> None:
        """Note that a window has opened. ``lasts_us``: its expected duration in microseconds; infinite: not known."""

    def room(self) -> float:
        """Return how long an operator may take, according to the plan, that still fits, in microseconds."""

    def launches(self, us: float) -> None:
        """Note that an operator is about to be launched, which takes ``us`` microseconds according to the plan."""

    def closes(self) -> None:
        """Note that no further operator is launched in this window."""


class HostTime:
    """For CPUs, on which an operator has been computed when its call returns: the host's clock counts."""

    def restart(self) -> None: ...

    def opens(self, lasts_us: float) -> None:
        self._lasts, self._began = lasts_us, time.perf_counter()

    def room(self) -> float:
        return self._lasts - (time.perf_counter() - self._began) * 1e6

    def launches(self, us: float) -> None: ...

    def closes(self) -> None: ...


class DeviceTime:
    """For accelerators: the planned times of what was launched count, corrected by what earlier windows have taken.

    Events around the operators of each window are read in a later iteration, when the device has passed them. Into a
    window whose duration is not known nothing is launched.

    Args:
        event: makes an event that can be timed.
    """

    def __init__(self, event: Callable[[], Any] = lambda: torch.cuda.Event(enable_timing=True)):
        self._event = event
        self._unread: list[tuple[Any, Any, float]] = []
        self._lasts, self._planned, self._ratio = 0.0, 0.0, 1.0
        self._began: Any = None

    def restart(self) -> None:
        passed = [window for window in self._unread if window[1].query()]
        self._unread = [window for window in self._unread if window not in passed]
        for began, ended, planned in passed:
            measured = began.elapsed_time(ended) * 1e3 / planned
            self._ratio = max(self._ratio + _WEIGHT * (measured - self._ratio), _LEAST)

    def opens(self, lasts_us: float) -> None:
        self._lasts, self._planned = lasts_us if math.isfinite(lasts_us) else 0.0, 0.0

    def room(self) -> float:
        return self._lasts / self._ratio - self._planned

    def launches(self, us: float) -> None:
        if not self._planned:
            self._began = self._event()
            self._began.record()
        self._planned += us

    def closes(self) -> None:
        if self._planned:
            ended = self._event()
            ended.record()
            self._unread.append((self._began, ended, self._planned))


def spent_on(device: torch.device) -> Spent:
    """Return the counter for operators of a device."""
    return DeviceTime() if device.type == "cuda" else HostTime()
