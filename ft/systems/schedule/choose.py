"""Choose a pipeline schedule for CheckFree+: plan schedules of each kind, check them, and take the cheapest valid one.

A microbatch is in flight on a stage between its forward and its backward, while the stage holds its activations. The
trainer's CheckFree layer and the command ``ft plan schedule`` use this module; the command also shows megatron-core's
own schedules ("1f1b" and "interleaved") for comparison.

"Woven" schedules are periodic orders in which no stage is idle between two units. A unit is a forward of duration f or
a backward of duration b. A *weave* repeats a pair of one normal and one swapped microbatch with the period T = 2 (f +
b). In a period, each stage runs one forward and one backward of both kinds, which take all of its time. So, modulo T,
the four units must fill the period of every stage without overlap: they tile it.

A *way* is the list of start times of one microbatch's units, by position on its route (position p is the p-th stage
that the microbatch passes). Modulo T, a way occupies a set of time slots at each position. A swapped microbatch has the
same positions, but on other stages, so every way can be used for both kinds. A tiling consists of one way for the
normal microbatches and one way, with an offset in time, for the swapped ones; each of the two occupies exactly the
slots that the other leaves free. For every way and offset, the search computes the free slots and looks up the ways
that occupy them. This is exact and fast. Its times are whole numbers; the orders of units that result can be used with
any forward and backward time.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import product
from typing import NamedTuple

from ft.base.errors import UserError
from ft.systems.schedule import kinds
from ft.systems.schedule.check import RuleResult, SimulationResult, check, in_flight, run
from ft.systems.schedule.kinds import insert_messages
from ft.systems.schedule.program import Program, Unit, swapped

SWAPPING = ("half-half", "woven")
"""Kinds of schedules that swap half of the microbatches; CheckFree+ can use them if they pass the check. They are
described in :mod:`ft.systems.schedule.kinds`, "woven" at the top of this module."""
KINDS = ("1f1b", "interleaved", *SWAPPING)
BEST = "best"

_GRIDS = ((2, 1), (1, 1), (2, 3), (1, 2), (1, 3))
"""(forward time, backward time) in whole numbers. Messages are placed in a schedule as if units took these times,
because stages then finish units at the same time more often. The true times only decide between the resulting
programs."""
_SMALL = ((2, 1), (1, 1), (1, 2), (1, 3))
"""The times of ``_GRIDS`` for which the search for weaves is fast. A weave is a periodic
order of normal and swapped microbatches in which no stage is idle."""
_MOST_TRIED = 12
"""Maximum number of weaves tried for each pair of times: those with the fewest microbatches in flight, which are also
the shortest."""
_OFF = (0.9, 1.1)
"""Factors by which the backward time is changed to find out how well a program does if the given times are inexact."""


@dataclass(frozen=True)
class Shape:
    """The requested shape of a pipeline. All times are in the same, arbitrary unit.

    Args:
        f: time of a stage's forward pass of one microbatch, all chunks together.
        b: time of a stage's backward pass of one microbatch, all chunks together.
        comm: time of a message.
        chunks: number of model chunks per stage; used by the interleaved schedule only.
        most_in_flight: number of microbatches whose activations a stage may hold at once; None for no limit.

    Raises:
        UserError: a number is not positive, or a time is negative.
    """

    stages: int
    microbatches: int
    f: float = 1.0
    b: float = 2.0
    comm: float = 0.0
    chunks: int = 2
    most_in_flight: int | None = None

    def __post_init__(self):
        if min(self.stages, self.microbatches, self.chunks) < 1:
            raise UserError("a pipeline has at least one stage, microbatch and chunk", "give positive numbers")
        if not (self.f > 0 and self.b > 0 and self.comm >= 0):
            raise UserError(
                "the times of units must be above 0, and the time of messages not below 0", "give positive times"
            )


@dataclass(frozen=True)
class PlannedSchedule:
    """A planned schedule.

    Attributes:
        ran: result of simulating the program, with its duration.
        findings: results of checking the program.
    """

    kind: str
    shape: Shape
    chunks: int
    program: Program
    ran: SimulationResult
    findings: tuple[RuleResult, ...]

    @property
    def valid(self) -> bool:
        return not any(finding.faults for finding in self.findings)

    @property
    def bubble(self) -> float | None:
        """Return the fraction of the iteration in which a stage runs no unit; None if the program deadlocks.

        The fraction is the same on all stages, because all stages have the same amount of work.
        """
        if self.ran.stuck:
            return None
        return 1 - self.shape.microbatches * (self.shape.f + self.shape.b) / self.ran.end

    @property
    def in_flight(self) -> list[float]:
        """Return for each stage the maximum number of microbatches whose activations it holds at once.

        With n chunks per stage, the activations of one chunk count as 1/n microbatch.
        """
        return [held / self.chunks for held in in_flight(self.program)]


def plan(kind: str, shape: Shape) -> PlannedSchedule:
    """Return the cheapest schedule of a kind together with the results of its check, which it may fail.

    Args:
        kind: one of KINDS, or BEST for the best of all kinds that swap half of the microbatches.

    Raises:
        UserError: there is no schedule of this kind and shape, or with BEST, no schedule passes the check.
    """
    if kind == BEST:
        return best(compared(shape))
    chunks = shape.chunks if kind == "interleaved" else 1
    weighed = [_weigh(shape, chunks, program) for program in _programs(kind, shape)]
    least = min(each.cost for each in weighed)
    found = min((each for each in weighed if each.cost == least), key=partial(_off, shape, chunks))
    most = None if shape.most_in_flight is None else [shape.most_in_flight * chunks] * shape.stages
    return PlannedSchedule(kind, shape, chunks, found.program, found.ran, tuple(check(found.program, most)))


class _Weighed(NamedTuple):
    """A program, its cost and its simulation.

    Attributes:
        cost: (whether more microbatches are in flight than allowed, whether the program deadlocks, duration, maximum
            number of microbatches in flight on a stage); smaller is better.
    """

    cost: tuple
    program: Program
    ran: SimulationResult


def _weigh(shape: Shape, chunks: int, program: Program) -> _Weighed:
    ran = run(program, _duration(shape.f / chunks, shape.b / chunks), shape.comm)
    most = max(in_flight(program))
    too_much = shape.most_in_flight is not None and most > shape.most_in_flight * chunks
    return _Weighed((too_much, bool(ran.stuck), round(ran.end, 9), most), program, ran)


def _off(shape: Shape, chunks: int, weighed: _Weighed) -> tuple[float, int]:
    """Return a secondary cost that decides between programs of equal cost; smaller is better.

    Returns:
        (sum of the durations with backward passes 10 % shorter and 10 % longer than given, sum over the stages of the
        maximum number of microbatches in flight).
    """
    ends = (run(weighed.program, _duration(shape.f / chunks, b * shape.b / chunks), shape.comm).end for b in _OFF)
    return round(sum(ends), 9), sum(in_flight(weighed.program))


def compared(shape: Shape) -> list[PlannedSchedule]:
    """Return a planned schedule for every kind in ``SWAPPING``, in this order."""
    return [plan(kind, shape) for kind in SWAPPING]


def best(planned: Iterable[PlannedSchedule]) -> PlannedSchedule:
    """Return the shortest valid schedule; among equally short ones, the one with the fewest microbatches in flight.

    Raises:
        UserError: no schedule is valid.
    """
    valid = [each for each in planned if each.valid]
    if not valid:
        raise UserError("no schedule that swaps half of the microbatches can run here", "allow more in flight")
    return min(valid, key=lambda each: (round(each.ran.end, 9), max(each.in_flight), sum(each.in_flight)))


def _duration(f: float, b: float) -> Callable[[Unit], float]:
    return lambda unit: b if unit.backward else f


def _programs(kind: str, shape: Shape) -> Iterator[Program]:
    """Yield the candidate programs of a kind."""
    given = (shape.stages, shape.microbatches)
    grids = [*_GRIDS, (shape.f + shape.comm, shape.b + shape.comm)]
    if kind == "1f1b":
        yield kinds.one_f_one_b(*given)
    elif kind == "interleaved":
        yield from (kinds.interleaved(*given, shape.chunks, _duration(*grid)) for grid in grids)
    elif kind == "half-half":
        yield from (kinds.half_half(*given, _duration(*grid)) for grid in grids)
    elif kind == "woven":
        yield from _woven(shape)
    else:
        raise UserError(f"there is no kind of schedule {kind!r}", f"give one of {', '.join((*KINDS, BEST))}")


def _woven(shape: Shape) -> Iterator[Program]:
    """Yield the candidate programs of kind "woven".

    Weaves are searched for several pairs of whole-number times. Messages are then placed twice in the order of each
    weave: as if units took these times, and as if they took the true times. In a weave, nearly every unit is preceded
    by a message, so the true time of a unit includes the time of a message.
    """
    true = (shape.f + shape.comm, shape.b + shape.comm)
    routes = kinds.half_swapped(shape.stages, shape.microbatches)
    near = sorted(_SMALL, key=lambda grid: abs(grid[1] / grid[0] - shape.b / shape.f))[:2]
    for grid in dict.fromkeys((*near, (1, 2))):
        for weave in weaves(shape.stages, *grid)[:_MOST_TRIED]:
            order = orders(weave, shape.microbatches)
            for f, b in dict.fromkeys((grid, true)):
                yield insert_messages(routes, order, _duration(f, b))[0]


# --- woven schedules --------------------------------------------------------------------------------------------------


class Way(NamedTuple):
    """Start times of one microbatch's units, by position on its route; the first forward starts at 0."""

    forwards: tuple[int, ...]
    backwards: tuple[int, ...]


class Weave(NamedTuple):
    """A periodic order of normal and swapped microbatches in which no stage is idle.

    Attributes:
        swapped: start times of the swapped microbatch, relative to its own first forward.
        offset: time from the first forward of the normal microbatch to that of the swapped one; may be negative.
    """

    normal: Way
    swapped: Way
    offset: int
    f: int
    b: int

    @property
    def period(self) -> int:
        return 2 * (self.f + self.b)

    @property
    def held(self) -> int:
        """Return the sum of the times from the start of each forward to that of its backward, over stages and kinds.

        This is the number of microbatches in flight, summed over the stages, times the period.
        """
        return sum(sum(way.backwards) - sum(way.forwards) for way in (self.normal, self.swapped))


_SEARCHED = 8
"""Number of stages up to which weaves are searched; a weave of more stages is made by inserting two middle stages into
one with two stages less."""
_MOST_DELAY = 12
"""Maximum delay of a microbatch that is searched, summed over the waits between its units."""


@lru_cache(maxsize=64)
def weaves(stages: int, f: int, b: int, more: int = 2) -> tuple[Weave, ...]:
    """Return all weaves whose delay per microbatch is at most the least possible one plus ``more``.

    The delay is the sum of the waits between the units of a microbatch. The weaves are sorted by :attr:`Weave.held`.

    Args:
        more: delay above the least one, in the same unit of time.
    """
    if stages > _SEARCHED:
        found = [wider for weave in weaves(stages - 2, f, b, more) if (wider := _wider(weave)) is not None]
    else:
        least = next((delay for delay in range(_MOST_DELAY + 1) if any(_tilings(stages, f, b, delay))), None)
        found = [] if least is None else list(_tilings(stages, f, b, least + more))
    return tuple(sorted(found, key=lambda weave: (weave.held, weave)))


def orders(weave: Weave, microbatches: int) -> list[list[Unit]]:
    """Return the units of each stage in the order of their start. Even microbatches are normal, odd ones swapped."""
    timed: list[list[tuple[int, Unit]]] = [[] for _ in weave.normal.forwards]
    stages = len(timed)
    routes = [list(range(stages)), [place.stage for place in swapped(stages)]]
    for microbatch in range(microbatches):
        pair, kind = divmod(microbatch, 2)
        way, shift = (weave.swapped, weave.offset) if kind else (weave.normal, 0)
        for position, stage in enumerate(routes[kind]):
            for backward, starts in enumerate(way):
                at = starts[position] + shift + pair * weave.period
                timed[stage].append((at, Unit(stage, microbatch, 0, bool(backward))))
    return [[unit for _, unit in sorted(units)] for units in timed]


def _tilings(stages: int, f: int, b: int, delay: int) -> Iterator[Weave]:
    """Yield the weaves in which the delay of either way is at most ``delay``."""
    period = 2 * (f + b)
    full = (1 << period) - 1
    route = [place.stage for place in swapped(stages)]
    by_taken: dict[tuple[int, ...], list[Way]] = {}
    for way, taken in _ways(stages, f, b, delay):
        by_taken.setdefault(taken, []).append(way)
    for taken, offset in product(by_taken, range(period)):
        # The way is used for the swapped microbatches, so stage route[p] has the slots of position p.
        left = [0] * stages
        for stage, moments in zip(route, taken, strict=True):
            left[stage] = full & ~_shifted(moments, offset, period)
        for normal, other in product(by_taken.get(tuple(left), ()), by_taken[taken]):
            # Either kind may be the first one of a pair; the tiling is the same, but the orders differ.
            yield from (Weave(normal, other, shift, f, b) for shift in (offset, offset - period))


def _ways(stages: int, f: int, b: int, delay: int) -> Iterator[tuple[Way, tuple[int, ...]]]:
    """Yield (way, time slots) for all ways with at most ``delay`` whose units do not overlap at any position.

    The time slots are those that the way occupies at each position, modulo the period, as bits of an integer.
    """
    period = 2 * (f + b)
    for forwards, left in _chains(stages, f, 0, delay):
        taken = [_shifted((1 << f) - 1, start, period) for start in forwards]
        for backwards, moments in _back(taken, forwards[-1] + f, b, left, period):
            yield Way(forwards, backwards), moments


def _chains(length: int, step: int, start: int, delay: int) -> Iterator[tuple[tuple[int, ...], int]]:
    """Yield (starts of consecutive units, remaining delay).

    Args:
        delay: maximum sum of the waits between the units.
    """
    if length == 1:
        yield (start,), delay
        return
    for waits in range(delay + 1):
        for rest, left in _chains(length - 1, step, start + step + waits, delay - waits):
            yield (start, *rest), left


def _back(
    taken: Sequence[int], earliest: int, b: int, delay: int, period: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield (starts of the backwards, occupied time slots), both by position.

    Args:
        taken: time slots that the forward occupies at each position, as bits.
        earliest: earliest start of the backward at the last position.
        delay: maximum sum of the waits before the backwards.
    """
    if not taken:
        yield (), ()
        return
    for waits in range(delay + 1):
        moments = _shifted((1 << b) - 1, earliest + waits, period)
        if not moments & taken[-1]:
            for starts, others in _back(taken[:-1], earliest + waits + b, b, delay - waits, period):
                yield (*starts, earliest + waits), (*others, moments | taken[-1])


def _shifted(moments: int, by: int, period: int) -> int:
    """Return a set of time slots, one bit each, shifted by ``by`` modulo the period."""
    moved = moments << by % period
    return (moved | moved >> period) & ((1 << period) - 1)


def _wider(weave: Weave) -> Weave | None:
    """Return the weave with two more middle stages, at which microbatches do not wait; None if that is impossible.

    Two stages add 2 f to the forward of a microbatch and 2 b to its backward. The units on the stages behind them start
    2 f later, and the backwards on the stages before them one period (2 f + 2 b) later. Therefore every other stage is
    still filled without overlap.
    """
    stages = len(weave.normal.forwards)
    for at in range(2, stages - 3 + 1):
        wider = weave._replace(normal=_longer(weave.normal, at, weave), swapped=_longer(weave.swapped, at, weave))
        if all(_tiled(wider, stage) for stage in (at, at + 1)):
            return wider
    return None


def _longer(way: Way, at: int, weave: Weave) -> Way:
    """Return ``way`` with two more positions, inserted before position ``at``."""
    f, b = weave.f, weave.b
    last, back = way.forwards[at - 1], way.backwards[at - 1] + weave.period
    forwards = (*way.forwards[:at], last + f, last + 2 * f, *(start + 2 * f for start in way.forwards[at:]))
    earlier = (start + weave.period for start in way.backwards[:at])
    return Way(forwards, (*earlier, back - b, back - 2 * b, *(start + 2 * f for start in way.backwards[at:])))


def _tiled(weave: Weave, stage: int) -> bool:
    """Return whether the units of a middle stage do not overlap, modulo the period."""
    period, taken = weave.period, 0
    for way, shift in ((weave.normal, 0), (weave.swapped, weave.offset)):
        for starts, length in ((way.forwards, weave.f), (way.backwards, weave.b)):
            moments = _shifted((1 << length) - 1, starts[stage] + shift, period)
            if moments & taken:
                return False
            taken |= moments
    return True
