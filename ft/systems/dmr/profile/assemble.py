"""Make a trace for the DMR planner from the recordings of all ranks, and measure what verifications cost.

The trace is made by simulating the pipeline schedule. Clocks of different stages are not compared, and measured waits
for other stages are not used as idle times, because a stage also waits while the profiler of another stage is writing
its record. In the trace, each unit takes as long as its stage has measured. The idle time between units is that of the
simulated schedule (``ft.systems.dmr.plan.predict``). The duration of a message is a low quantile of the measured waits.
The costs of verifications are measured once per profile, on the device of the run.
"""

import math
import statistics
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from msgspec import structs

from ft.base.errors import UserError
from ft.systems.dmr.digest import same, writer
from ft.systems.dmr.plan.predict import Timeline, idle, simulate, unit_of
from ft.systems.dmr.plan.trace import IN_UNITS, OPTIMIZER, RECOMPUTE, MemoryInUse, Operator, Tensor, Trace, Window
from ft.systems.dmr.profile.recorder import P2P, StageRecord
from ft.systems.dmr.runtime.cursor import OperatorCall
from ft.systems.dmr.runtime.findings import Findings
from ft.systems.dmr.runtime.operators import call_of
from ft.systems.dmr.runtime.queue import Execution, Replay, entry, verify
from ft.systems.schedule.kinds import Pipeline, orders
from ft.systems.schedule.program import Unit

_REPEATS = 20
_LARGE = 1 << 22


@dataclass(frozen=True)
class ComparisonCosts:
    """Microseconds of verifying an operator, without its second execution: of comparing results of any size, in
    addition for each byte, and of recording an operator for a deferred verification."""

    fixed_us: float
    us_per_byte: float
    defer_us: float = 0.0

    def us(self, count: int) -> float:
        """Return the duration of comparing ``count`` bytes, in microseconds."""
        return self.fixed_us + count * self.us_per_byte


def measure(device: torch.device) -> ComparisonCosts:
    """Return the costs on ``device``, each a median of several measurements. ``fixed_us`` and ``defer_us`` are measured
    with a small operator, ``us_per_byte`` with a large tensor, as two digests (on a CPU, one comparison)."""
    findings = Findings(device, 0)
    small, large = torch.ones(16, device=device), torch.ones(_LARGE // 4, device=device)
    func = torch.ops.aten.add.Tensor
    at, call = OperatorCall("add.Tensor", "forward", 0, 0, 0, 0), call_of(func, (small, small))

    waiting = entry(Execution(at, call, func(small, small), None), 0)
    alone = _median_us(lambda: func(small, small), device)
    fixed = max(_median_us(lambda: verify(waiting, findings), device) - alone, 0.0)
    replay = Replay(findings, _REPEATS + 1, 0)
    aside = _median_us(lambda: replay.record(Execution(at, call, small, None)), device)
    findings.restart()
    return ComparisonCosts(fixed, _median_us(_comparison(large), device) / _LARGE, aside)


def _comparison(tensor: torch.Tensor) -> Callable[[], object]:
    if tensor.device.type == "cpu":
        other = tensor.clone()
        return lambda: same(tensor, other)
    write = writer(tensor.device)
    rows = torch.empty((2, 2), dtype=torch.int64, device=tensor.device).unbind()

    def twice():
        for row in rows:
            write(tensor, 0, row)

    return twice


def _median_us(work: Callable[[], object], device: torch.device) -> float:
    took = []
    for _ in range(_REPEATS):
        _settle(device)
        began = time.perf_counter()
        work()
        _settle(device)
        took.append(time.perf_counter() - began)
    return statistics.median(took) * 1e6


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


_FASTER = 0.25
"""Quantile of the measured waits for messages that is used as the duration of a message for which no stage was late."""


@dataclass
class Block:
    """Consecutive events (operators and waits) of a stage: those before its first unit, those of one unit and until the
    next wait for another stage, or those after its last unit.

    Attributes:
        unit: the unit; None for the events before the first unit and after the last unit.
        events: numbers of the events in the stage's record.
        us: duration of the events without waits for other stages, in microseconds.
        waits: True if the block contains a wait for another stage.
        waited_us: total duration of these waits, in microseconds.
    """

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
    """Return the trace of one iteration.

    Args:
        records: the records of all stages, in order.
        pipeline: the schedule of the run; its ``comm_us`` (duration of a message) is replaced by a measured one.
        budget: memory of a device in bytes; None if unknown.
        unstable: names of operators that are not reproducible.

    Raises:
        UserError: the stages have not executed the units of ``pipeline`` in its order.
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
    ops, windows, tensors, memory = [], [], {}, {}
    for record, found in zip(records, cut, strict=True):
        starts = _starts(record, found, timeline, begins)
        ops += _operators(record, starts, costs, unstable)
        windows += [*_windows(record, starts), *_windows_between(record.stage, found, timeline, begins)]
        tensors |= _tensors(record, starts)
        memory[record.stage] = _live(record, starts)
    windows.sort(key=lambda window: (window.stage, window.start_us))
    units = tuple((unit, begins + start, begins + end) for unit, (start, end) in timeline.times.items())
    return Trace(
        dict(fingerprint), tuple(ops), tensors, tuple(windows), MemoryInUse(memory, budget), pipeline, units=units
    )


def blocks(record: StageRecord) -> list[Block]:
    """Return the events of a stage, divided into blocks: before the first unit, of each unit, and after the last unit.
    Events between two units belong to the earlier unit if a wait for another stage follows them, else to the later
    unit."""
    found = [Block(None)]
    loose: list[int] = []
    for number, event in enumerate(record.events):
        if _waits_for_message(event):
            _put(record, found[-1], loose)
            found[-1].waits = True
            found[-1].waited_us += record.times[number].us
            found[-1].events.append(number)
            found[-1].us += record.times[number].gap_us
            continue
        loose.append(number)
        if isinstance(event, Operator) and event.phase in IN_UNITS:
            if (unit := unit_of(event)) != found[-1].unit:
                found.append(Block(unit))
            _put(record, found[-1], loose)
    found.append(Block(None))
    _put(record, found[-1], loose)
    return found


def _put(record: StageRecord, block: Block, loose: list[int]) -> None:
    block.events += loose
    block.us += sum(record.times[number].gap_us + record.times[number].us for number in loose)
    loose.clear()


def _waits_for_message(event: Operator | Window) -> bool:
    """Return whether the event is a wait for another stage."""
    return isinstance(event, Window) and event.kind == P2P


def _comm_us(cut: Sequence[Sequence[Block]]) -> float:
    """Return the duration of a message for which no stage was late, in microseconds: a low quantile of the waits
    between units."""
    waited = sorted(block.waited_us for found in cut for block in found[1:-1] if block.waits)
    return waited[int(len(waited) * _FASTER)] if waited else 0.0


def _starts(record: StageRecord, found: Sequence[Block], timeline: Timeline, begins: float) -> list[float]:
    """Return the start times of all events of a stage, in microseconds since the iteration began. ``begins``: start of
    the schedule."""
    starts = [0.0] * len(record.events)
    for block in found:
        if block.unit is not None:
            now = begins + timeline.times[block.unit][0]
        else:
            now = 0.0 if block is found[0] else begins + timeline.end_us
        for number in block.events:
            event, time = record.events[number], record.times[number]
            now += time.gap_us
            starts[number] = now
            now += 0.0 if _waits_for_message(event) else time.us
    return starts


def _windows_between(stage: int, found: Sequence[Block], timeline: Timeline, begins: float) -> list[Window]:
    """Return the windows of a stage between units. These are the idle times in the simulated schedule; idle times after
    a unit behind which the stage did not wait for another stage in the run are left out."""
    waits = {block.unit for block in found[1:-1] if block.waits}
    idles = [one for one in idle(timeline) if one.stage == stage and one.after in waits]
    return [
        Window(f"s{stage}.between.{number}", begins + one.start_us, one.end_us - one.start_us, one.kind, stage)
        for number, one in enumerate(idles)
    ]


def _operators(
    record: StageRecord, starts: Sequence[float], costs: ComparisonCosts, unstable: Collection[str]
) -> Iterator[Operator]:
    """Yield the operators of a stage with their times and costs. ``starts``: start times of all its events, in
    microseconds since the iteration began."""
    last = {op.ac_segment: op.id for op in record.events if isinstance(op, Operator) and op.phase != RECOMPUTE}
    for op, start, timed in zip(record.events, starts, record.times, strict=True):
        if isinstance(op, Operator):
            yield structs.replace(
                op,
                start_us=start,
                t_us=timed.us,
                compare_us=costs.us(sum(record.memory[name].bytes for name in (*op.out_ids, *op.mutates))),
                defer_us=costs.defer_us,
                deterministic=op.name not in unstable,
                is_segment_last=op.ac_segment is not None and last.get(op.ac_segment) == op.id,
            )


def _tensors(record: StageRecord, starts: Sequence[float]) -> dict[str, Tensor]:
    ends = [*starts, starts[-1]]
    return {
        name: Tensor(one.bytes, None if one.freed is None else ends[one.freed]) for name, one in record.memory.items()
    }


def _windows(record: StageRecord, starts: Sequence[float]) -> Iterator[Window]:
    """Yield the windows that the stage has measured: those inside units, and those after the last unit and before the
    optimizer, beyond whose begin no verification is deferred."""
    events = list(zip(record.events, starts, record.times, strict=True))
    updates = (start for event, start, _ in events if isinstance(event, Operator) and event.phase == OPTIMIZER)
    last = next(updates, math.inf)
    for event, start, timed in events:
        if isinstance(event, Window) and event.kind != P2P and start <= last:
            yield structs.replace(event, start_us=start, dur_us=timed.us)


def _live(record: StageRecord, starts: Sequence[float]) -> tuple[tuple[float, float], ...]:
    """Return (time in microseconds, bytes in use from then on) for each change."""
    found: list[tuple[float, float]] = []
    for at, live in zip(starts, record.live, strict=True):
        if not found or found[-1][1] != live:
            found.append((at, float(live)))
    return tuple(found)
