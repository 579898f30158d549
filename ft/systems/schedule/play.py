"""Simulate a pipeline schedule with buffered messages: a stage waits only for the inputs of its units.

A unit is the forward or backward of one microbatch on one stage.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from ft.systems.schedule.units import Unit


class ScheduleTimes(NamedTuple):
    """The result of a simulation.

    Attributes:
        times: unit -> (start, end).
        free: unit -> time from which on its stage can run the next unit.
    """

    times: Mapping[Unit, tuple[float, float]]
    free: Mapping[Unit, float]


class ScheduleDeadlock(Exception):
    """The given orders of units cannot be executed, because stages wait for each other.

    Args:
        units: the next unit of each unfinished stage.
    """

    def __init__(self, units: Sequence[Unit]):
        self.units = tuple(units)
        super().__init__(f"stages wait for each other: {', '.join(map(str, self.units))}")


def play(
    order: Sequence[Sequence[Unit]],
    needs: Callable[[Unit], Unit | None],
    duration: Callable[[Unit], float],
    *,
    comm_us: float = 0.0,
    waits_until_sent: Callable[[Unit], bool] | None = None,
    behind: Callable[[Unit], float] | None = None,
) -> ScheduleTimes:
    """Simulate the orders with buffered messages: a sender never waits for its receiver.

    Args:
        order: each stage's units, in the order in which it runs them.
        needs: returns the unit whose result a unit waits for; None if it waits for nothing.
        duration: returns the time that a unit takes; all times have the same unit as ``comm_us``.
        comm_us: time from the end of a unit until its result is at another stage.
        waits_until_sent: returns True for units after which the stage waits ``comm_us`` before it continues; None if no
            stage ever does.
        behind: returns the work that a stage does after a unit and before its next one, while the unit's message is in
            flight.

    Raises:
        ScheduleDeadlock: the orders cannot be executed.
    """
    times: dict[Unit, tuple[float, float]] = {}
    free: dict[Unit, float] = {}
    done = [0] * len(order)
    left = sum(map(len, order))
    while left:
        before = left
        for stage, units in enumerate(order):
            while done[stage] < len(units):
                unit = units[done[stage]]
                source = needs(unit)
                if source is not None and source not in times:
                    break
                ready = free[units[done[stage] - 1]] if done[stage] else 0.0
                start = max(ready, _arrival(source, stage, times, comm_us))
                end = start + duration(unit)
                times[unit] = (start, end)
                free[unit] = end + (behind(unit) if behind else 0.0)
                if waits_until_sent is not None and waits_until_sent(unit):
                    free[unit] = max(free[unit], end + comm_us)
                done[stage] += 1
                left -= 1
        if left == before:
            raise ScheduleDeadlock([units[at] for units, at in zip(order, done, strict=True) if at < len(units)])
    return ScheduleTimes(times, free)


def _arrival(source: Unit | None, stage: int, times: Mapping[Unit, tuple[float, float]], comm_us: float) -> float:
    if source is None:
        return 0.0
    return times[source][1] + (comm_us if source.stage != stage else 0.0)
