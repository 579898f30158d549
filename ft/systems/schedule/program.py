"""An executable pipeline schedule (a program): each stage's units, and the batches of messages between them.

A unit is the forward or backward of one microbatch on one stage. A stage executes its steps, units and batches, one
after the other. A batch is one ``batch_isend_irecv``, as megatron-core's ``P2PCommunicator`` calls it: all its sends
and receives are posted together, and the stage continues when all are complete. Messages have no tags: the k-th message
that stage A sends to stage B is the k-th message that B receives from A.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ft.systems.schedule.routes import Routes
from ft.systems.schedule.units import Unit


class Message(NamedTuple):
    """The result of a unit (the activation of a forward, the gradient of a backward), sent to another stage.

    Attributes:
        source: the sending stage.
        target: the receiving stage.
        unit: the unit, which runs on ``source``.
    """

    source: int
    target: int
    unit: Unit


Batch = tuple[Message, ...]
"""One stage's part of an exchange: the messages of which it is the source or the target, in the order in which they are
posted. ``FLUSH`` is the empty batch, at which every stage waits for all others."""

FLUSH: Batch = ()

Step = Unit | Batch


@dataclass(frozen=True)
class Program:
    """A pipeline schedule.

    Attributes:
        routes: the route of each microbatch through the stages.
        stages: the steps of each stage.
    """

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
    return () if unit.stage == target.stage else (Message(unit.stage, target.stage, unit),)
