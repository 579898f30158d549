"""Construct 1F1B and interleaved 1F1B as megatron-core runs them, and half-half, and insert the messages between stages
such that a schedule cannot deadlock.

In half-half, half of the microbatches are swapped: they pass through the first two and the last two stages in swapped
order, as CheckFree+ (CheckFree, section 4.3) needs; the other half is normal.

A message is exchanged as soon as its sender and its receiver are both between two units. To find out when that is, the
order is simulated. At every time at which units end, all results whose sender and receiver are between units are
exchanged, and the messages of one stage at that time are one batch (one ``batch_isend_irecv``).

All batches are thereby ordered by the simulated clock: a batch waits only for batches of the same time. Therefore the
program cannot deadlock, whatever the durations of the units in a real run, and every pair of stages sends and receives
in the same order. A stage that needs a message stays between units until the message has arrived, so that batches are
found for every order that can be executed at all.
"""

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from ft.base.errors import UserError
from ft.systems.schedule.check import ScheduleDeadlock
from ft.systems.schedule.program import (
    NORMAL,
    SWAPPED,
    Program,
    Routes,
    StageMessage,
    Step,
    Unit,
    beside_units,
    straight,
    swapped,
)

_TOLERANCE = 1e-9
"""Times whose difference is at most this, relative to the time (at least 1), are treated as equal."""


def insert_messages(
    routes: Routes, order: Sequence[Sequence[Unit]], duration: Callable[[Unit], float]
) -> tuple[Program, float]:
    """Return the program, and the time at which its last unit ends if messages take no time.

    Args:
        order: the units of each stage, in the order in which it runs them.
        duration: returns the time of a unit, more than 0. With whole numbers, messages wait less, because stages are
            between units at the same time more often.

    Raises:
        ScheduleDeadlock: the orders cannot be executed, because stages wait for each other.
    """
    simulation = _Simulation(routes, order, duration)
    now = 0.0
    while simulation.ends:
        now = simulation.end_units()
        simulation.add_batches()
        simulation.start_units(now)
    left = [units[at] for units, at in zip(order, simulation.next, strict=True) if at < len(units)]
    if left:
        raise ScheduleDeadlock(left)
    return Program(routes, tuple(map(tuple, simulation.steps))), now


class _Simulation:
    """The simulation of a given order of units.

    Attributes:
        ends: heap of (end, stage) of the running units; stage -1 stands for the start of the simulation.
    """

    def __init__(self, routes: Routes, order: Sequence[Sequence[Unit]], duration: Callable[[Unit], float]):
        self.routes, self.order, self.duration = routes, order, duration
        self.next = [0] * len(order)
        self.steps: list[list[Step]] = [[] for _ in order]
        self.ends: list[tuple[float, int]] = [(0.0, -1)]
        self._running: list[Unit | None] = [None] * len(order)
        self._waiting: list[StageMessage] = []
        self._arrived: set[Unit] = set()

    def end_units(self) -> float:
        """Advance to the next time at which units end, end these units, and return the time."""
        first = self.ends[0][0]
        now = first
        while self.ends and self.ends[0][0] <= first + _TOLERANCE * max(1.0, first):
            now, stage = heapq.heappop(self.ends)
            if stage < 0:
                continue
            unit, self._running[stage] = self._running[stage], None
            target = self.routes.receiver(unit)
            if target is None:
                continue
            if target.stage == stage:
                self._arrived.add(unit)
            else:
                self._waiting.append(StageMessage(stage, target.stage, unit))
        return now

    def add_batches(self) -> None:
        """Add one batch for each stage that can exchange messages now."""
        batches: dict[int, list[StageMessage]] = {}
        still = []
        for message in self._waiting:
            if self._running[message.source] is None and self._running[message.target] is None:
                self._arrived.add(message.unit)
                for stage in message[:2]:
                    batches.setdefault(stage, []).append(message)
            else:
                still.append(message)
        self._waiting = still
        for stage, batch in batches.items():
            self.steps[stage].append(tuple(batch))

    def start_units(self, now: float) -> None:
        """Start the next unit of each stage that is between units, if the input of the unit has arrived."""
        for stage, units in enumerate(self.order):
            at = self.next[stage]
            if self._running[stage] is not None or at == len(units):
                continue
            source = self.routes.needs(units[at])
            if source is None or source in self._arrived:
                self._running[stage] = units[at]
                self.next[stage] += 1
                self.steps[stage].append(units[at])
                heapq.heappush(self.ends, (now + self.duration(units[at]), stage))


@dataclass(frozen=True)
class Pipeline:
    """The shape of a schedule.

    Args:
        comm_us: time from the end of a unit until its result is at the next stage, in microseconds.
        blocking: whether a stage waits until its own message has been sent, as megatron-core does without
            overlap_p2p_comm.
        group: number of microbatches that run through a chunk before the next chunk has its turn
            (microbatch_group_size_per_virtual_pipeline_stage); 0 for the default, P.

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
                fix = f"give two or more stages, and groups of at least {self.stages} microbatches, also the last one"
                raise UserError(problem, fix)

    @cached_property
    def routes(self) -> Routes:
        """Return the routes of the microbatches: all pass the stages in their order, once for each chunk."""
        return Routes([straight(self.stages, self.chunks)] * self.microbatches)


def orders(pipeline: Pipeline) -> tuple[tuple[Unit, ...], ...]:
    """Return each stage's units in the order in which it runs them.

    A stage begins with as many forwards as are needed to fill the stages behind it. Then it runs one forward and one
    backward in turn, and finally the remaining backwards (as megatron-core's ``get_pp_rank_microbatches`` and
    ``get_schedule_table`` define).
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
    """Return (microbatch, chunk) of a stage's forwards: a group of microbatches passes one chunk after the other."""
    return [
        (microbatch, chunk)
        for first in range(0, microbatches, group)
        for chunk in range(chunks)
        for microbatch in range(first, min(first + group, microbatches))
    ]


Duration = Callable[[Unit], float]
"""Returns the time that a unit takes, in any unit of time."""


def one_f_one_b(stages: int, microbatches: int) -> Program:
    """Return megatron-core's 1F1B with its own batches of messages; no microbatch is swapped."""
    pipeline = Pipeline(stages, microbatches)
    return beside_units(pipeline.routes, orders(pipeline))


def interleaved(stages: int, microbatches: int, chunks: int, duration: Duration) -> Program:
    """Return megatron-core's interleaved 1F1B; no microbatch is swapped.

    A message is exchanged as soon as sender and receiver are both between two units.

    Raises:
        UserError: no such schedule exists.
    """
    pipeline = Pipeline(stages, microbatches, chunks)
    return insert_messages(pipeline.routes, orders(pipeline), duration)[0]


def half_half(stages: int, microbatches: int, duration: Duration) -> Program:
    """Return 1F1B over the normal microbatches followed by 1F1B over the swapped ones, without a pause in between.

    A stage that has run all its normal forwards runs units of the swapped pass while it waits for normal backwards. No
    stage holds the activations of more microbatches than 1F1B needs at the earlier of the two positions that the stage
    has on the normal and on the swapped route.

    Raises:
        UserError: too few stages or microbatches to swap.
    """
    routes = half_swapped(stages, microbatches)
    return insert_messages(routes, _merged(routes, _passes(stages, microbatches), duration), duration)[0]


def half_swapped(stages: int, microbatches: int) -> Routes:
    """Return the routes of microbatches of which the even ones are normal and the odd ones swapped.

    Raises:
        UserError: too few stages or microbatches to swap.
    """
    if microbatches < 2:
        raise UserError(
            "CheckFree+ swaps half of the microbatches, and there is only one", "give at least 2 microbatches"
        )
    return Routes.of(stages, [SWAPPED if microbatch % 2 else NORMAL for microbatch in range(microbatches)])


def _passes(stages: int, microbatches: int) -> list[list[list[Unit]]]:
    """Return for both halves of the microbatches, normal and swapped, the 1F1B order of each stage's units."""
    passes = []
    for first, way in ((0, straight(stages)), (1, swapped(stages))):
        half = range(first, microbatches, 2)
        mapped: list[list[Unit]] = [[] for _ in range(stages)]
        for position, units in enumerate(orders(Pipeline(stages, len(half)))):
            stage = way[position].stage
            mapped[stage] = [unit._replace(stage=stage, microbatch=half[unit.microbatch]) for unit in units]
        passes.append(mapped)
    return passes


def _merged(routes: Routes, passes: Sequence[Sequence[Sequence[Unit]]], duration: Duration) -> list[list[Unit]]:
    """Return the units of both passes for each stage, in the order in which a simulation runs them.

    If units of both passes can run, the first pass has priority.
    """
    stages = [_Merging(routes, [list(reversed(one[stage])) for one in passes]) for stage in range(routes.stages)]
    ended: dict[Unit, float] = {}
    moments = [0.0]
    while moments:
        now = heapq.heappop(moments)
        for stage in stages:
            unit = stage.take(ended, now) if stage.free <= now else None
            if unit is not None:
                stage.free = ended[unit] = now + duration(unit)
                heapq.heappush(moments, stage.free)
    return [stage.order for stage in stages]


class _Merging:
    """One stage in the simulation of ``_merged``.

    Args:
        left: the remaining units of each pass in reverse order, so that the next unit is the last one.

    Attributes:
        free: time at which the stage has finished its last unit.
    """

    def __init__(self, routes: Routes, left: list[list[Unit]]):
        self.order: list[Unit] = []
        self.free = 0.0
        self._routes, self._left, self._held = routes, left, 0
        self._most = routes.stages - min(routes.position(units[0]) for units in left)

    def take(self, ended: Mapping[Unit, float], now: float) -> Unit | None:
        """Remove and return the next unit that can run at time ``now``; None if no unit can.

        ``ended`` maps every unit that was run to the time of its end.
        """
        for units, may in zip(self._left, (True, self._second_may_begin()), strict=True):
            if not units or not (may or units[-1].backward):
                continue
            source = self._routes.needs(units[-1])
            if source is None or ended.get(source, now + 1) <= now:
                self._held += -1 if units[-1].backward else 1
                self.order.append(units.pop())
                return self.order[-1]
        return None

    def _second_may_begin(self) -> bool:
        """Return whether a forward of the second pass may run.

        It may if all forwards of the first pass have run, and the stage holds fewer microbatches than it may.
        """
        return self._held < self._most and all(unit.backward for unit in self._left[0])
