"""Measures on a GPU how long it waits for other ranks, without ever waiting for the GPU.

The host starts operations of a group and goes on, so its own time does not show who waits. The GPU does: its stream
stands still where it waits for an operation of NCCL. An event is recorded before and after that place, and the time
between the two is read when both have passed, at the end of the step or of a later one.

Recording and reading costs the host some microseconds for each operation. Where that would be more than ``_SHARE`` of
a step, because a step has thousands of operations, only every second, third, ... step is measured.
"""

import math
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping

import torch

from ft.base.step_clock import CLOCK
from ft.state.groups.device import DEVICE

_SHARE = 0.003
_MOST_APART = 100
"""At least every hundredth step is measured."""
_MOST_FREE = 20_000

Place = tuple[int, torch.cuda.Event]
"""A stream, and an event that was recorded on it."""


class Stalls:
    """The stalls of the GPU of this process. There is one such object per process, ``STALLS``."""

    def __init__(self) -> None:
        self._pairs: list[tuple[str, int, torch.cuda.Event, torch.cuda.Event]] = []
        self._free: deque[torch.cuda.Event] = deque(maxlen=_MOST_FREE)
        self._cost_s = 0.0
        self._until_next = 0
        self.cut: Callable[[float], Callable[[], Mapping[str, float] | None] | None] = self._cut

    def begins(self, trains: bool) -> Place | None:
        """Record an event on the current stream, before a place where it may wait for other ranks.

        Args:
            trains: whether the calling thread belongs to training.

        Returns:
            what :meth:`ends` needs; None if nothing is measured now.
        """
        if not trains or self._until_next or not CLOCK.is_running or torch.cuda.is_current_stream_capturing():
            return None
        began = time.perf_counter()
        CLOCK.cut_device = self.cut
        place = self._record(torch.cuda.current_stream())
        self._cost_s += time.perf_counter() - began
        return place

    def ends(self, group: str, before: Place | None) -> None:
        """Record an event after the place. ``group``: name of the process group. ``before``: from :meth:`begins`."""
        if before is None:
            return
        began = time.perf_counter()
        stream, event = before
        now, after = self._record(torch.cuda.current_stream())
        if now == stream:
            self._pairs.append((group, stream, event, after))
        self._cost_s += time.perf_counter() - began

    def _record(self, stream: torch.cuda.Stream) -> Place:
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        event.record(stream)
        return stream.cuda_stream, event

    def _cut(self, step_s: float) -> Callable[[], Mapping[str, float] | None] | None:
        """End a step; see :data:`ft.base.step_clock.CutDevice`.

        Only the stream counts on which the training thread is now: a wait of another stream need not stop this one.
        """
        if self._until_next:
            self._until_next -= 1
            return None
        own = torch.cuda.current_stream().cuda_stream
        pairs, self._pairs = [pair for pair in self._pairs if pair[1] == own], []
        cost_s, self._cost_s = self._cost_s, 0.0
        apart = math.ceil(cost_s / (_SHARE * step_s)) if step_s > 0.0 else 1
        self._until_next = min(max(apart, 1), _MOST_APART) - 1
        waiting, seconds = deque(pairs), defaultdict[str, float](float)
        return lambda: self._read(waiting, seconds)

    def _read(
        self, waiting: deque[tuple[str, int, torch.cuda.Event, torch.cuda.Event]], seconds: dict[str, float]
    ) -> Mapping[str, float] | None:
        """Return the seconds of a step by group, or None if the GPU has not come to its end or is being aborted."""
        began = time.perf_counter()
        try:
            while waiting:
                group, _, before, after = waiting[0]
                if not DEVICE.asks(after.query):
                    return None
                seconds[group] += before.elapsed_time(after) / 1e3
                waiting.popleft()
                self._free.extend((before, after))
        except RuntimeError:  # the device has failed; the program's calls say so
            return None
        finally:
            self._cost_s += time.perf_counter() - began
        return seconds


STALLS = Stalls()
