"""Place batches of messages in any order of units: a message is exchanged as soon as both its stages are between two
units.

The order is simulated with messages that need both ends. At every moment at which units end, all results are exchanged
whose sender and receiver are both between units; each stage's part of that moment is one batch. Batches are thereby
ordered by one clock: a batch only waits for batches of the same moment, which wait for nothing later. Whatever the
durations of the units in a real run, the program cannot deadlock, and every pair of stages sends and receives in the
same order. A stage that needs a message stays between units until it has the message, so that every order that can be
executed at all gets batches.
"""

import heapq
from collections.abc import Callable, Sequence

from ft.systems.schedule.play import Stuck
from ft.systems.schedule.program import Message, Program, Step
from ft.systems.schedule.routes import Routes
from ft.systems.schedule.units import Unit

_SAME = 1e-9
"""Times closer than this, relative to the latest, are the same moment."""


def meet(routes: Routes, order: Sequence[Sequence[Unit]], duration: Callable[[Unit], float]) -> tuple[Program, float]:
    """Return the program, and when its last unit ends if messages take no time.

    Args:
        routes: the routes of the microbatches.
        order: each stage's units.
        duration: returns a unit's time, more than 0; with whole numbers, stages are between units at the same time more
            often.

    Raises:
        Stuck: the orders wait for each other.
    """
    hall = _Hall(routes, order, duration)
    now = 0.0
    while hall.ends:
        now = hall.moment()
        hall.pass_messages()
        hall.start_units(now)
    left = [units[at] for units, at in zip(order, hall.next, strict=True) if at < len(units)]
    if left:
        raise Stuck(left)
    return Program(routes, tuple(map(tuple, hall.steps))), now


class _Hall:
    """The state of the simulation: for each stage, the unit that it is running, or none."""

    def __init__(self, routes: Routes, order: Sequence[Sequence[Unit]], duration: Callable[[Unit], float]):
        self.routes, self.order, self.duration = routes, order, duration
        self.next = [0] * len(order)
        self.steps: list[list[Step]] = [[] for _ in order]
        self.ends: list[tuple[float, int]] = [(0.0, -1)]
        self._running: list[Unit | None] = [None] * len(order)
        self._waiting: list[Message] = []
        self._there: set[Unit] = set()

    def moment(self) -> float:
        """End the units that end next, all at once; return the time."""
        first = self.ends[0][0]
        now = first
        while self.ends and self.ends[0][0] <= first + _SAME * max(1.0, first):
            now, stage = heapq.heappop(self.ends)
            if stage < 0:
                continue
            unit, self._running[stage] = self._running[stage], None
            target = self.routes.receiver(unit)
            if target is None:
                continue
            if target.stage == stage:
                self._there.add(unit)
            else:
                self._waiting.append(Message(stage, target.stage, unit))
        return now

    def pass_messages(self) -> None:
        """Add one batch for each stage that can exchange messages now."""
        batches: dict[int, list[Message]] = {}
        still = []
        for message in self._waiting:
            if self._running[message.source] is None and self._running[message.target] is None:
                self._there.add(message.unit)
                for stage in message[:2]:
                    batches.setdefault(stage, []).append(message)
            else:
                still.append(message)
        self._waiting = still
        for stage, batch in batches.items():
            self.steps[stage].append(tuple(batch))

    def start_units(self, now: float) -> None:
        """Start the next unit of each stage that runs none, if the input of the unit is there."""
        for stage, units in enumerate(self.order):
            at = self.next[stage]
            if self._running[stage] is not None or at == len(units):
                continue
            source = self.routes.needs(units[at])
            if source is None or source in self._there:
                self._running[stage] = units[at]
                self.next[stage] += 1
                self.steps[stage].append(units[at])
                heapq.heappush(self.ends, (now + self.duration(units[at]), stage))
