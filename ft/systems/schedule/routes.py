"""The route of each microbatch through the pipeline stages: normal, or with the first two and the last two swapped.

CheckFree+ (CheckFree, section 4.3) sends half of the microbatches through the P stages in the order 1, 0, 2, ..., P -
3, P - 1, P - 2, so that the two stages of a swapped pair learn to do each other's work. A unit is the forward or
backward of one microbatch on one stage.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

from ft.base.errors import UserError
from ft.systems.schedule.units import Unit

NORMAL, SWAPPED = "normal", "swapped"
LEAST_STAGES = 4
"""Minimum number of stages; with fewer, the first two and the last two stages overlap."""


class Place(NamedTuple):
    """One station on a route: model chunk ``chunk`` of stage ``stage``."""

    stage: int
    chunk: int


def straight(stages: int, chunks: int = 1) -> tuple[Place, ...]:
    """Return the normal route: stage after stage, once for each chunk."""
    return tuple(Place(stage, chunk) for chunk in range(chunks) for stage in range(stages))


def swapped(stages: int) -> tuple[Place, ...]:
    """Return the route with the first two stages exchanged, and the last two.

    Raises:
        UserError: there are too few stages.
    """
    if stages < LEAST_STAGES:
        problem = f"with {stages} stages, the first two and the last two stages overlap"
        raise UserError(problem, f"give CheckFree+ at least {LEAST_STAGES} stages")
    way = list(straight(stages))
    way[:2], way[-2:] = way[1::-1], way[:-3:-1]
    return tuple(way)


class Routes:
    """The forward route of each microbatch; its backward takes the same route in reverse.

    Args:
        ways: for each microbatch, the places that it passes, in order.
    """

    def __init__(self, ways: Sequence[tuple[Place, ...]]):
        self.ways = tuple(ways)
        self.stages = 1 + max(place.stage for way in self.ways for place in way)

    @classmethod
    def of(cls, stages: int, kinds: Sequence[str]) -> "Routes":
        """Return the routes of microbatches whose kinds (NORMAL or SWAPPED) are given, in a pipeline without chunks."""
        ways = {kind: swapped(stages) if kind == SWAPPED else straight(stages) for kind in set(kinds)}
        return cls([ways[kind] for kind in kinds])

    @cached_property
    def _position(self) -> list[dict[Place, int]]:
        positions = {way: {place: i for i, place in enumerate(way)} for way in set(self.ways)}
        return [positions[way] for way in self.ways]

    def position(self, unit: Unit) -> int:
        """Return the number of places that precede this unit on the route of its microbatch."""
        return self._position[unit.microbatch][Place(unit.stage, unit.chunk)]

    def units(self, microbatch: int) -> list[Unit]:
        """Return all forwards and then all backwards of a microbatch."""
        way = self.ways[microbatch]
        forwards = [Unit(stage, microbatch, chunk, False) for stage, chunk in way]
        return forwards + [unit._replace(backward=True) for unit in reversed(forwards)]

    def needs(self, unit: Unit) -> Unit | None:
        """Return the unit whose result is the input of ``unit``; it may be on the same stage.

        The result is None if the input of ``unit`` is training data.
        """
        way, at = self.ways[unit.microbatch], self.position(unit)
        if unit.backward:
            return unit._replace(backward=False) if at == len(way) - 1 else _at(way[at + 1], unit)
        return _at(way[at - 1], unit) if at > 0 else None

    def receiver(self, unit: Unit) -> Unit | None:
        """Return the unit that uses the result of ``unit``: the next forward or backward of the same microbatch.

        The unit may be on the same stage. The result is None if no other unit needs the result.
        """
        way, at = self.ways[unit.microbatch], self.position(unit)
        if unit.backward:
            return _at(way[at - 1], unit) if at > 0 else None
        return unit._replace(backward=True) if at == len(way) - 1 else _at(way[at + 1], unit)


def _at(place: Place, unit: Unit) -> Unit:
    return Unit(place.stage, unit.microbatch, place.chunk, unit.backward)
