"""Construct the pipeline schedules with a name: 1F1B, interleaved, two-pass, half-half and alternate.

In the last three, half of the microbatches are swapped: they pass through the first two and the last two stages in
swapped order, as CheckFree+ (CheckFree, section 4.3) needs; the other half is normal. A schedule is returned as a
:class:`ft.systems.schedule.program.Program`: for each stage, its units (the forward or backward of one microbatch) and
batches of messages.
"""

import heapq
from collections.abc import Callable, Mapping, Sequence

from ft.base.errors import UserError
from ft.systems.schedule import megatron
from ft.systems.schedule.meet import insert_messages
from ft.systems.schedule.program import FLUSH, Program, beside_units
from ft.systems.schedule.routes import NORMAL, SWAPPED, Routes, straight, swapped
from ft.systems.schedule.units import Unit

Duration = Callable[[Unit], float]
"""Returns the time that a unit takes, in any unit of time."""


def one_f_one_b(stages: int, microbatches: int) -> Program:
    """Return megatron-core's 1F1B with its own batches of messages; no microbatch is swapped."""
    order = megatron.orders(megatron.Pipeline(stages, microbatches))
    return beside_units(Routes([straight(stages)] * microbatches), order)


def interleaved(stages: int, microbatches: int, chunks: int, duration: Duration) -> Program:
    """Return megatron-core's interleaved 1F1B; no microbatch is swapped.

    A message is exchanged as soon as sender and receiver are both between two units.

    Args:
        stages: number of pipeline stages.
        microbatches: number of microbatches.
        chunks: number of model chunks of each stage.
        duration: returns the time that a unit takes.

    Raises:
        UserError: no such schedule exists.
    """
    order = megatron.orders(megatron.Pipeline(stages, microbatches, chunks))
    return insert_messages(Routes([straight(stages, chunks)] * microbatches), order, duration)[0]


def two_pass(stages: int, microbatches: int) -> Program:
    """Return 1F1B over the normal microbatches, a flush (all stages wait for each other), and 1F1B over the swapped
    ones.

    Raises:
        UserError: too few stages or microbatches to swap.
    """
    routes = half_swapped(stages, microbatches)
    first, second = (beside_units(routes, order).stages for order in _passes(stages, microbatches))
    return Program(routes, tuple((*a, FLUSH, *b) for a, b in zip(first, second, strict=True)))


def half_half(stages: int, microbatches: int, duration: Duration) -> Program:
    """Return the two passes of ``two_pass`` without a flush in between.

    A stage that has run all its normal forwards runs units of the swapped pass while it waits for normal backwards. No
    stage holds the activations of more microbatches than 1F1B needs at the earlier of the two positions that the stage
    has on the normal and on the swapped route.

    Args:
        stages: number of pipeline stages.
        microbatches: number of microbatches.
        duration: returns the time that a unit takes.

    Raises:
        UserError: too few stages or microbatches to swap.
    """
    routes = half_swapped(stages, microbatches)
    return insert_messages(routes, _merged(routes, _passes(stages, microbatches), duration), duration)[0]


def alternate(stages: int, microbatches: int) -> Program:
    """Return the naive schedule: 1F1B's own order on every stage, with every second microbatch swapped.

    Raises:
        UserError: too few stages or microbatches to swap.
    """
    order = megatron.orders(megatron.Pipeline(stages, microbatches))
    return beside_units(half_swapped(stages, microbatches), order)


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
        for position, units in enumerate(megatron.orders(megatron.Pipeline(stages, len(half)))):
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
        routes: the routes of the microbatches.
        left: the remaining units of each pass in reverse order, so that the next unit is the last one.

    Attributes:
        order: the units that the stage has run.
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
