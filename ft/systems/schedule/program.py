"""An executable pipeline schedule (a program): each stage's units, and the batches of messages between them; and the
route of each microbatch through the stages, normal or with the first two and the last two swapped.

CheckFree+ (CheckFree, section 4.3) sends half of the microbatches through the P stages in the order 1, 0, 2, ...,
P - 3, P - 1, P - 2, so that the two stages of a swapped pair learn to do each other's work.

A stage executes its steps, units and batches, one after the other. A batch is one ``batch_isend_irecv``, as
megatron-core's ``P2PCommunicator`` calls it: all its sends and receives are posted together, and the stage continues
when all are complete. Messages have no tags: the k-th message that stage A sends to stage B is the k-th message that B
receives from A.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from ft.base.errors import UserError


class Unit(NamedTuple):
    """One stage's forward or backward of one microbatch through one model chunk.

    Attributes:
        chunk: number of the model chunk on the stage; 0 without interleaving.
        backward: whether it is the backward.
    """

    stage: int
    microbatch: int
    chunk: int
    backward: bool


NORMAL, SWAPPED = "normal", "swapped"
LEAST_STAGES = 4
"""Minimum number of stages; with fewer, the first two and the last two stages overlap."""


class Station(NamedTuple):
    """One station on a route: model chunk ``chunk`` of stage ``stage``."""

    stage: int
    chunk: int


def straight(stages: int, chunks: int = 1) -> tuple[Station, ...]:
    """Return the normal route: stage after stage, once for each chunk."""
    return tuple(Station(stage, chunk) for chunk in range(chunks) for stage in range(stages))


def swapped(stages: int) -> tuple[Station, ...]:
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

    def __init__(self, ways: Sequence[tuple[Station, ...]]):
        self.ways = tuple(ways)
        self.stages = 1 + max(place.stage for way in self.ways for place in way)

    @classmethod
    def of(cls, stages: int, kinds: Sequence[str]) -> "Routes":
        """Return the routes of microbatches whose kinds (NORMAL or SWAPPED) are given, in a pipeline without chunks."""
        ways = {kind: swapped(stages) if kind == SWAPPED else straight(stages) for kind in set(kinds)}
        return cls([ways[kind] for kind in kinds])

    @cached_property
    def _position(self) -> list[dict[Station, int]]:
        positions = {way: {place: i for i, place in enumerate(way)} for way in set(self.ways)}
        return [positions[way] for way in self.ways]

    def position(self, unit: Unit) -> int:
        """Return the number of places that precede this unit on the route of its microbatch."""
        return self._position[unit.microbatch][Station(unit.stage, unit.chunk)]

    def units(self, microbatch: int) -> list[Unit]:
        """Return all forwards and then all backwards of a microbatch."""
        way = self.ways[microbatch]
        forwards = [Unit(stage, microbatch, chunk, False) for stage, chunk in way]
        return forwards + [unit._replace(backward=True) for unit in reversed(forwards)]

    def needs(self, unit: Unit) -> Unit | None:
        """Return the unit whose result is the input of ``unit``; it may be on the same stage.

        The result is None if the input of ``unit`` is training data.
        """
        return self._beside(unit, -1)

    def receiver(self, unit: Unit) -> Unit | None:
        """Return the unit that uses the result of ``unit``: the next forward or backward of the same microbatch.

        The unit may be on the same stage. The result is None if no other unit needs the result.
        """
        return self._beside(unit, 1)

    def _beside(self, unit: Unit, by: int) -> Unit | None:
        """Return the unit ``by`` places behind ``unit`` in the order of :meth:`units`, None if there is none."""
        way, at = self.ways[unit.microbatch], self.position(unit)
        number = by + (2 * len(way) - 1 - at if unit.backward else at)
        if not 0 <= number < 2 * len(way):
            return None
        stage, chunk = way[min(number, 2 * len(way) - 1 - number)]
        return Unit(stage, unit.microbatch, chunk, number >= len(way))


class StageMessage(NamedTuple):
    """The result of a unit (the activation of a forward, the gradient of a backward), sent to another stage."""

    source: int
    target: int
    unit: Unit


Batch = tuple[StageMessage, ...]
"""One stage's part of an exchange: the messages of which it is the source or the target, in the order in which they are
posted."""

Step = Unit | Batch


@dataclass(frozen=True)
class Program:
    """A pipeline schedule."""

    routes: Routes
    stages: tuple[tuple[Step, ...], ...]

    def order(self, stage: int) -> list[Unit]:
        """Return the units of a stage in order, without the batches."""
        return [step for step in self.stages[stage] if isinstance(step, Unit)]

    def batches(self, stage: int) -> Iterator[Batch]:
        """Return the batches of a stage in order, without the units."""
        return (step for step in self.stages[stage] if not isinstance(step, Unit))


def posted(program: Program) -> tuple[dict[tuple[int, int], list[Unit]], dict[tuple[int, int], list[Unit]]]:
    """Return the messages that are sent and those that are received, both as (source, target) -> units in order."""
    sent: dict[tuple[int, int], list[Unit]] = {}
    received: dict[tuple[int, int], list[Unit]] = {}
    for stage in range(len(program.stages)):
        for batch in program.batches(stage):
            for source, target, unit in batch:
                (sent if source == stage else received).setdefault((source, target), []).append(unit)
    return sent, received


def beside_units(routes: Routes, order: Sequence[Sequence[Unit]]) -> Program:
    """Return a program for ``order`` whose batches are at the same places as in megatron-core's schedules.

    A result is sent right after its unit, and an input is received right before its unit. All messages between the same
    two units are one batch.
    """
    return Program(routes, tuple(tuple(_beside(routes, units)) for units in order))


def _beside(routes: Routes, units: Sequence[Unit]) -> Iterator[Step]:
    leaving: Batch = ()
    for unit in units:
        source = routes.needs(unit)
        arriving = () if source is None else _message(source, unit)
        if leaving or arriving:
            yield (*leaving, *arriving)
        yield unit
        target = routes.receiver(unit)
        leaving = () if target is None else _message(unit, target)
    if leaving:
        yield leaving


def _message(unit: Unit, target: Unit) -> Batch:
    return () if unit.stage == target.stage else (StageMessage(unit.stage, target.stage, unit),)
