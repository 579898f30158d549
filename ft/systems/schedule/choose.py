"""Choose a pipeline schedule for CheckFree+: plan schedules of each kind, check them, and take the cheapest valid one.

CheckFree+ (CheckFree, section 4.3) sends half of the microbatches through the pipeline with the first two and the last
two stages swapped. A schedule is a :class:`Program`: for each stage, the order of its units (the forward or backward of
a microbatch) and of its messages. A microbatch is in flight on a stage between its forward and its backward, while the
stage holds its activations. The trainer's CheckFree layer and the command ``ft plan schedule`` use this module; the
command also shows megatron-core's own schedules ("1f1b" and "interleaved") for comparison.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from ft.base.errors import UserError
from ft.systems.schedule import kinds
from ft.systems.schedule.check import RuleResult, SimulationResult, check, in_flight, run
from ft.systems.schedule.kinds import insert_messages
from ft.systems.schedule.program import Program, Unit
from ft.systems.schedule.weave import orders, weaves

SWAPPING = ("half-half", "woven")
"""Kinds of schedules that swap half of the microbatches; CheckFree+ can use them if they pass the check. They are
described in :mod:`ft.systems.schedule.kinds`, "woven" in :mod:`ft.systems.schedule.weave`."""
KINDS = ("1f1b", "interleaved", *SWAPPING)
BEST = "best"

_GRIDS = ((2, 1), (1, 1), (2, 3), (1, 2), (1, 3))
"""(forward time, backward time) in whole numbers. Messages are placed in a schedule as if units took these times,
because stages then finish units at the same time more often. The true times only decide between the resulting
programs."""
_SMALL = ((2, 1), (1, 1), (1, 2), (1, 3))
"""The times of ``_GRIDS`` for which the search for weaves is fast. A weave (:mod:`ft.systems.schedule.weave`) is a
periodic order of normal and swapped microbatches in which no stage is idle."""
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
class Planned:
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


def plan(kind: str, shape: Shape) -> Planned:
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
    return Planned(kind, shape, chunks, found.program, found.ran, tuple(check(found.program, most)))


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


def compared(shape: Shape) -> list[Planned]:
    """Return a planned schedule for every kind in ``SWAPPING``, in this order."""
    return [plan(kind, shape) for kind in SWAPPING]


def best(planned: Iterable[Planned]) -> Planned:
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
