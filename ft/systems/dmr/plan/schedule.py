"""Simulate the pipeline schedule that DMR plans for: 1F1B and interleaved 1F1B as megatron-core runs them.

DMR (dual modular redundancy, SpareTrain) executes operators a second time while a pipeline stage is idle, and therefore
needs to know when stages are idle. Every stage executes its own fixed order of units (the forward or backward pass of
one microbatch through one of its model chunks). Before a unit it waits for the message of a neighbour that the unit
needs. The time between units is idle. Without communication time, every stage of 1F1B is idle for exactly (P - 1)(f +
b), where P is the number of stages and f and b are the times of a forward and a backward pass. Times are microseconds.
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
        free_us: unit -> time at which its stage could continue after the unit, including the work added after it.
    """

    pipeline: Pipeline
    order: tuple[tuple[Unit, ...], ...]
    times: Mapping[Unit, tuple[float, float]]
    free_us: Mapping[Unit, float]

    @property
    def end_us(self) -> float:
        """Return when the last stage has finished its units: the duration of the iteration, without data-parallel
        reductions and the optimizer step."""
        return max(max(self.times[order[-1]][1], self.free_us[order[-1]]) for order in self.order)


def simulate(
    pipeline: Pipeline, duration: Callable[[Unit], float], behind: Callable[[Unit], float] | None = None
) -> Timeline:
    """Simulate the schedule.

    Args:
        pipeline: number of stages, microbatches and chunks, and communication time.
        duration: returns the time of a unit in microseconds, without communication. A backward pass includes the
            gradients of inputs and of weights, because core's schedules send the input's gradient after both.
        behind: returns the time in microseconds that a stage spends on deferred verifications after a unit and before
            its next unit, while the message of the unit is already in flight. None: no such work.
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
    """Return all idle times, ordered by stage and time. If no work was added after units, the idle times of a stage add
    up to the end of the timeline minus the sum of its units' durations.

    An idle time is of kind p2p while a message is in flight that the stage waits to receive or to have sent. The rest
    is of kind bubble, as is the time from a stage's last unit until the slowest stage has finished.
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
    """Return the gap between two units as up to three idle times: the stage's own message is in flight (p2p), no
    message is in flight (bubble), the awaited message is in flight (p2p)."""
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
    """A message between two stages: the activation (forward) or its gradient (backward) of one microbatch.

    Attributes:
        microbatch: number of the microbatch.
        chunk: model chunk of the sender.
        backward: True for a gradient.
        sent_us: time at which it is sent, in microseconds.
    """

    microbatch: int
    chunk: int
    backward: bool
    sent_us: float = field(compare=False, default=0.0)


def messages(timeline: Timeline) -> dict[tuple[int, int], list[Message]]:
    """Return (sending stage, receiving stage) -> messages in the order in which they are sent."""
    found: dict[tuple[int, int], list[Message]] = {}
    for units in timeline.order:
        for unit in units:
            target = receiver(timeline.pipeline, unit)
            if target is not None and target.stage != unit.stage:
                message = Message(unit.microbatch, unit.chunk, unit.backward, timeline.times[unit][1])
                found.setdefault((unit.stage, target.stage), []).append(message)
    return found
