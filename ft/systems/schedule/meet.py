"""Insert the messages between pipeline stages into a given order of units, such that the schedule cannot deadlock.

A unit is the forward or backward of one microbatch on one stage. A message is exchanged as soon as its sender and its
receiver are both between two units. To find out when that is, the order is simulated. At every time at which units end,
all results whose sender and receiver are between units are exchanged, and the messages of one stage at that time are
one batch (one ``batch_isend_irecv``).

All batches are thereby ordered by the simulated clock: a batch waits only for batches of the same time. Therefore the
program cannot deadlock, whatever the durations of the units in a real run, and every pair of stages sends and receives
in the same order. A stage that needs a message stays between units until the message has arrived, so that batches are
found for every order that can be executed at all.
"""

import heapq
from collections.abc import Callable, Sequence

from ft.systems.schedule.play import ScheduleDeadlock
from ft.systems.schedule.program import Message, Program, Step
from ft.systems.schedule.routes import Routes
from ft.systems.schedule.units import Unit

_SAME = 1e-9
"""Times whose difference is at most this, relative to the time (at least 1), are treated as equal."""


def insert_messages(
    routes: Routes, order: Sequence[Sequence[Unit]], duration: Callable[[Unit], float]
) -> tuple[Program, float]:
    """Return the program, and the time at which its last unit ends if messages take no time.

    Args:
        routes: the routes of the microbatches.
        order: each stage's units in the order in which it runs them.
        duration: returns the time of a unit, more than 0. With whole numbers, messages wait less, because stages are
            between units at the same time more often.

    Raises:
        ScheduleDeadlock: the orders cannot be executed, because stages wait for each other.
    """
    simulation = _Simulation(routes, order, duration)
    now = 0.0
    while simulation.ends:
        now = simulation.end_units()
        simulation.add_batches()
        simulation.start_units(now)
    left = [units[at] for units, at in zip(order, simulation.next, strict=True) if at < len(units)]
    if left:
        raise ScheduleDeadlock(left)
    return Program(routes, tuple(map(tuple, simulation.steps))), now


class _Simulation:
    """The simulation of a given order of units.

    Attributes:
        routes: the routes of the microbatches.
        order: each stage's units.
        duration: returns the time of a unit.
        next: for each stage, the index of its next unit.
        steps: for each stage, the units and batches so far.
        ends: heap of (end, stage) of the running units; stage -1 stands for the start of the simulation.
    """

    def __init__(self, routes: Routes, order: Sequence[Sequence[Unit]], duration: Callable[[Unit], float]):
        self.routes, self.order, self.duration = routes, order, duration
        self.next = [0] * len(order)
        self.steps: list[list[Step]] = [[] for _ in order]
        self.ends: list[tuple[float, int]] = [(0.0, -1)]
        self._running: list[Unit | None] = [None] * len(order)
        self._waiting: list[Message] = []
        self._arrived: set[Unit] = set()

    def end_units(self) -> float:
        """Advance to the next time at which units end, end these units, and return the time."""
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
                self._arrived.add(unit)
            else:
                self._waiting.append(Message(stage, target.stage, unit))
        return now

    def add_batches(self) -> None:
        """Add one batch for each stage that can exchange messages now."""
        batches: dict[int, list[Message]] = {}
        still = []
        for message in self._waiting:
            if self._running[message.source] is None and self._running[message.target] is None:
                self._arrived.add(message.unit)
                for stage in message[:2]:
                    batches.setdefault(stage, []).append(message)
            else:
                still.append(message)
        self._waiting = still
        for stage, batch in batches.items():
            self.steps[stage].append(tuple(batch))

    def start_units(self, now: float) -> None:
        """Start the next unit of each stage that is between units, if the input of the unit has arrived."""
        for stage, units in enumerate(self.order):
            at = self.next[stage]
            if self._running[stage] is not None or at == len(units):
                continue
            source = self.routes.needs(units[at])
            if source is None or source in self._arrived:
                self._running[stage] = units[at]
                self.next[stage] += 1
                self.steps[stage].append(units[at])
                heapq.heappush(self.ends, (now + self.duration(units[at]), stage))
