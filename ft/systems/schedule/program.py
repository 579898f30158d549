"""An executable schedule: each stage's units, and the batches of messages between them.

A stage executes its steps one after the other. A batch is one ``batch_isend_irecv``, as megatron-core's
``P2PCommunicator`` calls it: all its sends and receives are posted together, and the stage continues when all are
complete. Messages have no tags: the k-th that one stage sends to another is the k-th that the other receives from it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ft.systems.schedule.routes import Routes
from ft.systems.schedule.units import Unit


class Message(NamedTuple):
    """The result of ``unit`` (a forward's activation, a backward's gradient), sent to another stage."""

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
    """The steps of all stages. ``stages``: the steps of each stage. ``routes``: the routes of the microbatches."""

    routes: Routes
    stages: tuple[tuple[Step, ...], ...]

    def order(self, stage: int) -> list[Unit]:
        """Return the stage's units without batches."""
        return [step for step in self.stages[stage] if isinstance(step, Unit)]

    def batches(self, stage: int) -> Iterator[Batch]:
        """Return the stage's batches without units."""
        return (step for step in self.stages[stage] if not isinstance(step, Unit))


def posted(program: Program) -> tuple[dict[tuple[int, int], list[Unit]], dict[tuple[int, int], list[Unit]]]:
    """Return (source, target) -> units whose results are sent, in order, and the same for those received."""
    sent: dict[tuple[int, int], list[Unit]] = {}
    received: dict[tuple[int, int], list[Unit]] = {}
    for stage in range(len(program.stages)):
        for batch in program.batches(stage):
            for source, target, unit in batch:
                (sent if source == stage else received).setdefault((source, target), []).append(unit)
    return sent, received


def beside_units(routes: Routes, order: Sequence[Sequence[Unit]]) -> Program:
    """Place batches where megatron-core's schedules have them: a result is sent right after its unit, an input is
    received right before, and what falls into the same gap between two units is one batch."""
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
