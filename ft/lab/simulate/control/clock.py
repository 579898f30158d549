"""Virtual time: a heap of what happens next, and the clocks that hosts read."""

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


class Timeline:
    """What is to happen, in order; what is due at the same moment happens in the order in which it was asked for.

    ``now``: true seconds since the beginning, which nobody inside the simulation can read.
    """

    def __init__(self):
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[..., None], tuple]] = []
        self._asked = 0

    def after(self, seconds: float, action: Callable[..., None], *arguments: Any) -> None:
        """``action(*arguments)`` happens ``seconds`` from now."""
        self._asked += 1
        heapq.heappush(self._heap, (self.now + seconds, self._asked, action, arguments))

    def turn(self) -> bool:
        """The next thing happens; False if there is none."""
        if not self._heap:
            return False
        self.now, _, action, arguments = heapq.heappop(self._heap)
        action(*arguments)
        return True


@dataclass(frozen=True)
class HostClock:
    """A host's monotonic clock: it began anywhere (``offset``, seconds) and runs fast or slow (``rate``, about 1)."""

    offset: float
    rate: float

    def read(self, now: float) -> float:
        return self.offset + self.rate * now

    def true(self, seconds: float) -> float:
        """How long ``seconds`` on this clock really take."""
        return seconds / self.rate
