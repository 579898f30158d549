"""One trace out of what the stages have written down: the schedule is played through with the times they measured.

Clocks of stages are not compared, and a wait for another stage is not taken at its word: while the profiler writes,
others wait for it. So units of work are as long as each stage has measured them, and the time between them is what the
schedule leaves (``ft.systems.dmr.plan.schedule``), with messages as fast as the faster ones were seen to be.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ft.base.errors import UserError
from ft.systems.dmr.plan.schedule import Pipeline, Timeline, Unit, idle, orders, simulate
from ft.systems.dmr.plan.trace import (
    BACKWARD,
    IN_UNITS,
    OPTIMIZER,
    RECOMPUTE,
    Checking,
    Memory,
    Operator,
    Segment,
    Tensor,
    Trace,
    Window,
)
from ft.systems.dmr.profile.costs import ComparisonCosts
from ft.systems.dmr.profile.events import P2P, Done, Event, StageRecord, Timed, Waited
from ft.systems.dmr.runtime.cursor import operator_id

_FASTER = 0.25
"""The share of messages that are taken for those that nobody was late for."""


@dataclass
class Block:
    """A stage's events that go together: those before the pipeline (unit None), a unit with what follows it until the
    stage waits for another one, and those after the pipeline. ``waits``: it is followed by such a wait."""

    unit: Unit | None
    events: list[int] = field(default_factory=list)
    us: float = 0.0
    waits: bool = False
    waited_us: float = 0.0


def assemble(
    records: Sequence[StageRecord],
    pipeline: Pipeline,
    costs: ComparisonCosts,
    fingerprint: Mapping[str, object],
    budget: float | None = None,
    unstable: Collection[str] = (),
) -> Trace:
    """The trace of one iteration.

    Args:
        records: of every stage, in order. pipeline: the run's, its ``comm_us`` yet unknown.
        budget: bytes that a device has, if that is known. unstable: names of operators that are not reproducible.

    Raises:
        UserError: the stages have not worked through that schedule.
    """
    cut = [blocks(record) for record in records]
    for record, found, order in zip(records, cut, orders(pipeline), strict=True):
        if [block.unit for block in found[1:-1]] != list(order):
            problem = f"stage {record.stage} has not run the schedule of {pipeline.microbatches} microbatches that a "
            raise UserError(f"{problem}profile needs: {pipeline}", "profile iterations of constant batch size")
    pipeline = replace(pipeline, comm_us=_comm_us(cut))
    us = {block.unit: block.us for found in cut for block in found[1:-1]}
    timeline = simulate(pipeline, us.__getitem__)
    begins = max(found[0].us for found in cut)
    stages = [
        _Stage(record, _starts(record, found, timeline, begins), costs, frozenset(unstable))
        for record, found in zip(records, cut, strict=True)
    ]
    windows = [
        window
        for stage, found in zip(stages, cut, strict=True)
        for window in (*stage.windows(), *_windows_between(stage.record.stage, found, timeline, begins))
    ]
    return Trace(
        fingerprint=dict(fingerprint),
        ops=tuple(op for stage in stages for op in stage.operators()),
        tensors={tensor.id: tensor for stage in stages for tensor in stage.tensors()},
        windows=tuple(sorted(windows, key=lambda window: (window.stage, window.start_us))),
        memory=Memory({stage.record.stage: stage.live() for stage in stages}, budget),
        pipeline=pipeline,
    )


def blocks(record: StageRecord) -> list[Block]:
    """The stage's events, cut where it waits for other stages between units.

    What it executes between two units belongs to the earlier one where such a wait follows, else to the later one.
    """
    found = [Block(None)]
    loose: list[int] = []
    for number, event in enumerate(record.notes.events):
        unit = _unit(event)
        if isinstance(event, Waited) and event.kind == P2P:
            _put(record, found[-1], loose)
            found[-1].waits = True
            found[-1].waited_us += record.times[number].us
            found[-1].events.append(number)
            found[-1].us += record.times[number].gap_us
            continue
        loose.append(number)
        if unit is not None:
            if unit != found[-1].unit:
                found.append(Block(unit))
            _put(record, found[-1], loose)
    found.append(Block(None))
    _put(record, found[-1], loose)
    return found


def _put(record: StageRecord, block: Block, loose: list[int]) -> None:
    block.events += loose
    block.us += sum(record.times[number].gap_us + record.times[number].us for number in loose)
    loose.clear()


def _unit(event: Event) -> Unit | None:
    if isinstance(event, Waited) or event.place.phase not in IN_UNITS:
        return None
    place = event.place
    return Unit(place.stage, place.microbatch, place.chunk, place.phase in (RECOMPUTE, BACKWARD))


def _comm_us(cut: Sequence[Sequence[Block]]) -> float:
    """A message's usual time: that of the quicker waits behind units."""
    waited = sorted(block.waited_us for found in cut for block in found[1:-1] if block.waits)
    return waited[int(len(waited) * _FASTER)] if waited else 0.0


def _starts(record: StageRecord, found: Sequence[Block], timeline: Timeline, begins: float) -> list[float]:
    """When each event of a stage began."""
    starts = [0.0] * len(record.notes.events)
    for block in found:
        if block.unit is not None:
            now = begins + timeline.times[block.unit][0]
        else:
            now = 0.0 if block is found[0] else begins + timeline.end_us
        for number in block.events:
            event, time = record.notes.events[number], record.times[number]
            now += time.gap_us
            starts[number] = now
            now += 0.0 if isinstance(event, Waited) and event.kind == P2P else time.us
    return starts


def _windows_between(stage: int, found: Sequence[Block], timeline: Timeline, begins: float) -> list[Window]:
    """What the schedule leaves idle behind those units where the stage waits at all."""
    waits = {block.unit for block in found[1:-1] if block.waits}
    idles = [one for one in idle(timeline) if one.stage == stage and one.after in waits]
    return [
        Window(f"s{stage}.between.{number}", stage, begins + one.start_us, one.end_us - one.start_us, one.kind)
        for number, one in enumerate(idles)
    ]


@dataclass
class _Stage:
    """A stage's part of the trace. ``starts``: of its events, microseconds."""

    record: StageRecord
    starts: Sequence[float]
    costs: ComparisonCosts
    unstable: frozenset[str]

    def operators(self) -> list[Operator]:
        last = self._last_of_segments()
        return [
            self._operator(event, self.starts[number], self.record.times[number], is_last=number in last)
            for number, event in enumerate(self.record.notes.events)
            if isinstance(event, Done)
        ]

    def _last_of_segments(self) -> set[int]:
        last: dict[int, int] = {}
        for number, event in enumerate(self.record.notes.events):
            if isinstance(event, Done) and event.segment is not None and event.place.phase != RECOMPUTE:
                last[event.segment] = number
        return set(last.values())

    def _operator(self, done: Done, start: float, time: Timed, *, is_last: bool) -> Operator:
        memory = self.record.notes.memory
        made = sum(memory[number].bytes for number in (*done.outs, *done.changes))
        segment = None if done.segment is None else Segment(f"s{self.record.stage}.ac{done.segment}", is_last)
        costs = {"compare_us": self.costs.us(made), "defer_us": self.costs.defer_us}
        nature = {"rng": done.rng, "deterministic": done.name not in self.unstable}
        checking = Checking(mutates=self._names(done.changes), segment=segment, **nature, **costs)
        identity = operator_id(self.record.stage, *done.unit, done.index)
        names = self._names(done.ins), self._names(done.outs)
        return Operator(identity, done.name, done.place, start, time.us, *names, checking)

    def _names(self, numbers: Sequence[int]) -> tuple[str, ...]:
        return tuple(f"s{self.record.stage}.t{number}" for number in numbers)

    def tensors(self) -> list[Tensor]:
        return [
            Tensor(name, one.bytes, None if one.freed is None else self._when(one.freed))
            for name, one in zip(
                self._names(range(len(self.record.notes.memory))), self.record.notes.memory, strict=True
            )
        ]

    def _when(self, event: int) -> float:
        return self.starts[event] if event < len(self.starts) else self.starts[-1]

    def windows(self) -> list[Window]:
        """Those that the stage has measured itself: inside units, and behind the pipeline."""
        stage, last = self.record.stage, self._optimizer_begins()
        return [
            Window(f"s{stage}.{event.kind}.{event.number}", stage, start, time.us, event.kind, event.dynamic)
            for event, start, time in zip(self.record.notes.events, self.starts, self.record.times, strict=True)
            if isinstance(event, Waited) and event.kind != P2P and start <= last
        ]

    def _optimizer_begins(self) -> float:
        """After that nothing waits for windows."""
        events = zip(self.record.notes.events, self.starts, strict=True)
        begins = (at for event, at in events if isinstance(event, Done) and event.place.phase == OPTIMIZER)
        return next(begins, float("inf"))

    def live(self) -> tuple[tuple[float, float], ...]:
        """Bytes in use, from each instant at which they change."""
        found: list[tuple[float, float]] = []
        for at, live in zip(self.starts, self.record.notes.live, strict=True):
            if not found or found[-1][1] != live:
                found.append((at, float(live)))
        return tuple(found)
