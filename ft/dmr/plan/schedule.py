"""Pipeline schedules, played through event by event: 1F1B and interleaved 1F1B as megatron-core runs them.

Every stage works through its own fixed order of units (the forward or backward of one microbatch through one of its
model chunks) and waits for what a unit needs from its neighbours. What is left between units is idle: windows. With no
communication time, every stage of 1F1B is idle for exactly (P - 1)(f + b). Times are microseconds.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from ft.errors import UserError


class Unit(NamedTuple):
    """One stage's work on one microbatch in one model chunk, in one direction."""

    stage: int
    microbatch: int
    chunk: int
    backward: bool


@dataclass(frozen=True)
class Pipeline:
    """A schedule's shape.

    Args:
        stages: P. microbatches: M of one iteration. chunks: model chunks per stage; more than one: interleaved.
        comm_us: from a unit's end until its result is at the neighbour.
        blocking: a stage waits until its own message has gone, as megatron-core does without overlap_p2p_comm.
        group: microbatches that run through a chunk before the next chunk's turn
            (microbatch_group_size_per_virtual_pipeline_stage); 0: P, as by default.

    Raises:
        UserError: no such schedule exists.
    """

    stages: int
    microbatches: int
    chunks: int = 1
    comm_us: float = 0.0
    blocking: bool = True
    group: int = 0

    def __post_init__(self):
        fix = "give at least one of each"
        if min(self.stages, self.microbatches, self.chunks) < 1 or self.comm_us < 0 or self.group < 0:
            raise UserError(f"no pipeline has {self}", fix)
        if self.chunks > 1:
            group, rest = self.group or self.stages, self.microbatches % (self.group or self.stages)
            if self.stages < 2 or group < self.stages or 0 < rest < self.stages:
                problem = f"an interleaved schedule cannot run {self.microbatches} microbatches in groups of {group}"
                raise UserError(problem, f"give two stages or more, groups of at least {self.stages}, none cut short")


def orders(pipeline: Pipeline) -> tuple[tuple[Unit, ...], ...]:
    """Each stage's units in the order in which it runs them.

    A stage begins with as many forwards as it takes to fill the stages behind it, then runs one forward and one
    backward in turn, then the backwards that are left (megatron-core's ``get_pp_rank_microbatches`` and
    ``get_schedule_table``).
    """
    return tuple(_order(pipeline, stage) for stage in range(pipeline.stages))


def _order(pipeline: Pipeline, stage: int) -> tuple[Unit, ...]:
    chunks, behind = pipeline.chunks, pipeline.stages - stage - 1
    table = _table(pipeline.microbatches, chunks, pipeline.group or pipeline.stages)
    forwards = [Unit(stage, microbatch, chunk, False) for microbatch, chunk in table]
    backwards = [Unit(stage, microbatch, chunks - 1 - chunk, True) for microbatch, chunk in table]
    first = behind if chunks == 1 else 2 * behind + (chunks - 1) * (pipeline.group or pipeline.stages)
    first = min(first, len(table))
    steady = [unit for pair in zip(forwards[first:], backwards, strict=False) for unit in pair]
    return (*forwards[:first], *steady, *backwards[len(table) - first :])


def _table(microbatches: int, chunks: int, group: int) -> list[tuple[int, int]]:
    """(microbatch, chunk) of a stage's forwards: a group of microbatches passes one chunk after the other."""
    return [
        (microbatch, chunk)
        for first in range(0, microbatches, group)
        for chunk in range(chunks)
        for microbatch in range(first, min(first + group, microbatches))
    ]


def needs(pipeline: Pipeline, unit: Unit) -> Unit | None:
    """The unit whose result this one waits for; None: the input data. It may be on the same stage."""
    stage, microbatch, chunk, backward = unit
    last = pipeline.stages - 1
    if not backward:
        if stage > 0:
            return Unit(stage - 1, microbatch, chunk, False)
        return Unit(last, microbatch, chunk - 1, False) if chunk > 0 else None
    if stage < last:
        return Unit(stage + 1, microbatch, chunk, True)
    if chunk < pipeline.chunks - 1:
        return Unit(0, microbatch, chunk + 1, True)
    return Unit(stage, microbatch, chunk, False)


@dataclass(frozen=True)
class Timeline:
    """When each unit ran: unit -> (start, end) in microseconds. ``order``: each stage's units as they ran.

    ``free_us``: unit -> when its stage could have gone on after it (work added behind it included).
    """

    pipeline: Pipeline
    order: tuple[tuple[Unit, ...], ...]
    times: Mapping[Unit, tuple[float, float]]
    free_us: Mapping[Unit, float]

    @property
    def end_us(self) -> float:
        """When the last stage is done: the iteration's time, without what follows the pipeline."""
        return max(max(self.times[order[-1]][1], self.free_us[order[-1]]) for order in self.order)


def simulate(
    pipeline: Pipeline, duration: Callable[[Unit], float], behind: Callable[[Unit], float] | None = None
) -> Timeline:
    """Plays the schedule through.

    Args:
        pipeline: its shape.
        duration: a unit's time, without communication: f, or b + w where the weights' gradients are separate (core's
            schedules send the input's gradient after both).
        behind: work a stage does after a unit and before its next one, while the unit's message already travels:
            deferred verifications.
    """
    order = orders(pipeline)
    times: dict[Unit, tuple[float, float]] = {}
    free: dict[Unit, float] = {}
    done = [0] * pipeline.stages
    left = sum(map(len, order))
    while left:
        before = left
        for stage, units in enumerate(order):
            while done[stage] < len(units):
                unit = units[done[stage]]
                source = needs(pipeline, unit)
                if source is not None and source not in times:
                    break
                start = max(
                    free[units[done[stage] - 1]] if done[stage] else 0.0, _arrival(pipeline, source, stage, times)
                )
                end = start + duration(unit)
                times[unit] = (start, end)
                free[unit] = end + (behind(unit) if behind else 0.0)
                if pipeline.blocking and _sends(pipeline, unit):
                    free[unit] = max(free[unit], end + pipeline.comm_us)
                done[stage] += 1
                left -= 1
        if left == before:
            raise RuntimeError("the schedule waits for itself")
    return Timeline(pipeline, order, times, free)


def _arrival(pipeline: Pipeline, source: Unit | None, stage: int, times: Mapping[Unit, tuple[float, float]]) -> float:
    if source is None:
        return 0.0
    return times[source][1] + (pipeline.comm_us if source.stage != stage else 0.0)


def receiver(pipeline: Pipeline, unit: Unit) -> Unit | None:
    """The unit that waits for this one's result; None: nothing does."""
    stage, microbatch, chunk, backward = unit
    last = pipeline.stages - 1
    if backward:
        if stage > 0:
            return Unit(stage - 1, microbatch, chunk, True)
        return Unit(last, microbatch, chunk - 1, True) if chunk > 0 else None
    if stage < last:
        return Unit(stage + 1, microbatch, chunk, False)
    if chunk < pipeline.chunks - 1:
        return Unit(0, microbatch, chunk + 1, False)
    return Unit(stage, microbatch, chunk, True)


def _sends(pipeline: Pipeline, unit: Unit) -> bool:
    target = receiver(pipeline, unit)
    return target is not None and target.stage != unit.stage


class Idle(NamedTuple):
    """Time in which a stage runs no unit. ``kind``: "p2p" while a message of its own travels, else "bubble".

    ``after``: the unit before it; None: the iteration begins with it, and there is nothing yet to verify.
    """

    stage: int
    start_us: float
    end_us: float
    kind: str
    after: Unit | None


def idle(timeline: Timeline) -> list[Idle]:
    """All idle times, by stage and time. Without work ``behind`` units they add up to end - sum of durations.

    The part of a gap in which a message travels that the stage waits for, or that it sends and waits to be gone, is
    p2p; the rest is bubble, as is the time after a stage's last unit until the slowest stage is done.
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
    """One gap as up to three windows: the own message leaves, nothing, the awaited message arrives."""
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
    """What travels between two stages: the activation (forward) or its gradient (backward) of one microbatch."""

    microbatch: int
    chunk: int
    backward: bool
    sent_us: float = field(compare=False, default=0.0)


def messages(timeline: Timeline) -> dict[tuple[int, int], list[Message]]:
    """(from stage, to stage) -> messages in the order in which they are sent. ``chunk`` is the sender's."""
    found: dict[tuple[int, int], list[Message]] = {}
    for units in timeline.order:
        for unit in units:
            target = receiver(timeline.pipeline, unit)
            if target is not None and target.stage != unit.stage:
                message = Message(unit.microbatch, unit.chunk, unit.backward, timeline.times[unit][1])
                found.setdefault((unit.stage, target.stage), []).append(message)
    return found
