"""Simulate the pipeline schedule that DMR plans for: 1F1B and interleaved 1F1B as megatron-core runs them.

Every stage executes its own fixed order of units (the forward or backward of one microbatch through one of its model
chunks) and waits for what a unit needs from its neighbours. The time left between units is idle: these are the windows.
With no communication time, every stage of 1F1B is idle for exactly (P - 1)(f + b). Times are microseconds.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from ft.systems.schedule.megatron import Pipeline, needs, orders, receiver
from ft.systems.schedule.play import play
from ft.systems.schedule.units import Unit

__all__ = [
    "Idle",
    "Message",
    "Pipeline",
    "Timeline",
    "Unit",
    "idle",
    "messages",
    "needs",
    "orders",
    "receiver",
    "simulate",
]


@dataclass(frozen=True)
class Timeline:
    """The result of a simulation.

    Attributes:
        pipeline: the simulated pipeline.
        order: units of each stage in the order of their execution.
        times: unit -> (start, end) in microseconds.
        free_us: unit -> when its stage could have continued after it, including work added behind it.
    """

    pipeline: Pipeline
    order: tuple[tuple[Unit, ...], ...]
    times: Mapping[Unit, tuple[float, float]]
    free_us: Mapping[Unit, float]

    @property
    def end_us(self) -> float:
        """Return when the last stage has finished: the duration of the iteration, without what follows the pipeline."""
        return max(max(self.times[order[-1]][1], self.free_us[order[-1]]) for order in self.order)


def simulate(
    pipeline: Pipeline, duration: Callable[[Unit], float], behind: Callable[[Unit], float] | None = None
) -> Timeline:
    """Simulate the schedule.

    Args:
        pipeline: its shape.
        duration: returns the time of a unit without communication: f, or b + w where the weights' gradients are
            separate (core's schedules send the input's gradient after both).
        behind: returns the work that a stage does after a unit and before its next one, while the unit's message is
            already in flight: deferred verifications.
    """
    order = orders(pipeline)
    played = play(
        order,
        partial(needs, pipeline),
        duration,
        comm_us=pipeline.comm_us,
        waits_until_sent=partial(_sends, pipeline) if pipeline.blocking else None,
        behind=behind,
    )
    return Timeline(pipeline, order, played.times, played.free)


def _sends(pipeline: Pipeline, unit: Unit) -> bool:
    target = receiver(pipeline, unit)
    return target is not None and target.stage != unit.stage


class Idle(NamedTuple):
    """Time in which a stage runs no unit.

    Attributes:
        stage: the stage.
        start_us: start of the idle time.
        end_us: end of the idle time.
        kind: "p2p" while a message of the stage is in flight, else "bubble".
        after: the unit before it; None at the beginning of the iteration, where there is nothing yet to verify.
    """

    stage: int
    start_us: float
    end_us: float
    kind: str
    after: Unit | None


def idle(timeline: Timeline) -> list[Idle]:
    """Return all idle times, by stage and time. Without work ``behind`` units they add up to end - sum of durations.

    The part of a gap in which a message is in flight that the stage waits for, or whose sending it waits for, is p2p;
    the rest is bubble, as is the time after a stage's last unit until the slowest stage has finished.
    """
    found: list[Idle] = []
    for stage, units in enumerate(timeline.order):
        previous = None
        for unit in (*units, None):
            start = timeline.times[previous][1] if previous else 0.0
            end = timeline.times[unit][0] if unit else timeline.end_us
            if end > start:
                found += _gap(timeline, stage, (start, end), previous, unit)
            previous = unit
    return found


def _gap(timeline: Timeline, stage: int, gap: tuple[float, float], previous: Unit | None, unit: Unit | None) -> list:
    """Return one gap as up to three windows: own message in flight, nothing, awaited message in flight."""
    pipeline, (start, end) = timeline.pipeline, gap
    comm = pipeline.comm_us
    sent = start
    if previous is not None and pipeline.blocking and _sends(pipeline, previous):
        sent = min(end, start + comm)
    source = None if unit is None else needs(pipeline, unit)
    waits = source is not None and source.stage != stage and comm > 0
    awaited = max(sent, timeline.times[source][1]) if waits else end
    parts = ((start, sent, "p2p"), (sent, awaited, "bubble"), (awaited, end, "p2p"))
    return [Idle(stage, a, b, kind, previous) for a, b, kind in parts if b > a]


@dataclass(frozen=True)
class Message:
    """A message between two stages: the activation (forward) or its gradient (backward) of one microbatch."""

    microbatch: int
    chunk: int
    backward: bool
    sent_us: float = field(compare=False, default=0.0)


def messages(timeline: Timeline) -> dict[tuple[int, int], list[Message]]:
    """Return (from stage, to stage) -> messages in the order in which they are sent. ``chunk`` is the sender's."""
    found: dict[tuple[int, int], list[Message]] = {}
    for units in timeline.order:
        for unit in units:
            target = receiver(timeline.pipeline, unit)
            if target is not None and target.stage != unit.stage:
                message = Message(unit.microbatch, unit.chunk, unit.backward, timeline.times[unit][1])
                found.setdefault((unit.stage, target.stage), []).append(message)
    return found
