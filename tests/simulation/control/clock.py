"""Virtual time of a simulated cluster: the discrete-event queue, and the clocks of hosts, which deviate from it."""

import heapq
import types
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any


@types.coroutine
def pause(seconds: float | None) -> Generator[float | None, None, None]:
    """Let a simulated thread be busy for ``seconds`` virtual seconds; None: let it wait for the next event."""
    yield seconds


class Timeline:
    """The event queue of a simulation. Events due at the same time run in the order in which they were scheduled.

    Attributes:
        now: true time, in virtual seconds since the beginning; no component of the simulated system can read it.
    """

    def __init__(self):
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[..., None], tuple]] = []
        self._asked = 0

    def after(self, seconds: float, action: Callable[..., None], *arguments: Any) -> None:
        """Schedule ``action(*arguments)`` for ``seconds`` from now."""
        self._asked += 1
        heapq.heappush(self._heap, (self.now + seconds, self._asked, action, arguments))

    def turn(self) -> bool:
        """Run the next event. Return False if there is none."""
        if not self._heap:
            return False
        self.now, _, action, arguments = heapq.heappop(self._heap)
        action(*arguments)
        return True


@dataclass(frozen=True)
class HostClock:
    """A host's monotonic clock.

    Attributes:
        offset: value of the clock at true time 0, in seconds.
        rate: speed of the clock relative to true time, about 1.
    """

    offset: float
    rate: float

    def read(self, now: float) -> float:
        """Return what the clock shows at true time ``now``, in seconds."""
        return self.offset + self.rate * now

    def true(self, seconds: float) -> float:
        """Return how long ``seconds`` on this clock are in true time, in seconds."""
        return seconds / self.rate
