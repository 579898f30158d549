"""Plans a schedule of a kind: its program, what it costs, and whether it may run; or the cheapest that may."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from ft.base.errors import UserError
from ft.systems.schedule import kinds
from ft.systems.schedule.check import Finding, check, in_flight
from ft.systems.schedule.meet import meet
from ft.systems.schedule.program import Program
from ft.systems.schedule.run import Ran, run
from ft.systems.schedule.units import Unit
from ft.systems.schedule.weave import orders, weaves

SWAPPING = ("two-pass", "half-half", "alternate", "woven")
"""Kinds that CheckFree+ can train with, if they pass the check."""
KINDS = ("1f1b", "interleaved", *SWAPPING)
BEST = "best"

_GRIDS = ((2, 1), (1, 1), (2, 3), (1, 2), (1, 3))
"""Forward and backward times in whole numbers on which stages meet: the true ones only weigh what comes out."""
_SMALL = ((2, 1), (1, 1), (1, 2), (1, 3))
"""Those of them with short periods, in which all weaves are found in no time."""
_MOST_TRIED = 12
"""Weaves tried for each grid: those that hold least, which are also the shortest."""
_OFF = (0.9, 1.1)


@dataclass(frozen=True)
class Shape:
    """What is asked for.

    Args:
        stages: P. microbatches: M of an iteration. chunks: model chunks per stage, for interleaved.
        f, b: times of a stage's forward and backward of one microbatch, all chunks together. comm: of a message. All
            in one unit of time, whichever.
        most_in_flight: microbatches whose activations a stage may hold at once; None: as many as it takes.

    Raises:
        UserError: there is no such pipeline.
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
            raise UserError("units take time, and messages no less than none", "give positive times")


@dataclass(frozen=True)
class Planned:
    """A schedule with what it costs. ``chunks``: model chunks per stage. ``findings``: of the check."""

    kind: str
    shape: Shape
    chunks: int
    program: Program
    ran: Ran
    findings: tuple[Finding, ...]

    @property
    def valid(self) -> bool:
        return not any(finding.faults for finding in self.findings)

    @property
    def bubble(self) -> float | None:
        """The share of the iteration in which a stage runs no unit (all have the same work); None: it has no end."""
        if self.ran.stuck:
            return None
        return 1 - self.shape.microbatches * (self.shape.f + self.shape.b) / self.ran.end

    @property
    def in_flight(self) -> list[float]:
        """By stage, the most microbatches' activations at once; a chunk holds its share of one."""
        return [held / self.chunks for held in in_flight(self.program)]


def plan(kind: str, shape: Shape) -> Planned:
    """The cheapest program of a kind, checked; one that may not run where the kind has no other.

    Raises:
        UserError: there is no schedule of this kind and shape, or for ``best`` none that may run.
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
    """A program, and its cost: what holds too much or never ends is dearest, then time counts, then memory."""

    cost: tuple
    program: Program
    ran: Ran


def _weigh(shape: Shape, chunks: int, program: Program) -> _Weighed:
    ran = run(program, _duration(shape.f / chunks, shape.b / chunks), shape.comm)
    most = max(in_flight(program))
    too_much = shape.most_in_flight is not None and most > shape.most_in_flight * chunks
    return _Weighed((too_much, bool(ran.stuck), round(ran.end, 9), most), program, ran)


def _off(shape: Shape, chunks: int, weighed: _Weighed) -> tuple[float, int]:
    """What it takes when a backward is a tenth shorter or longer than was said, then all that stages hold."""
    ends = (run(weighed.program, _duration(shape.f / chunks, b * shape.b / chunks), shape.comm).end for b in _OFF)
    return round(sum(ends), 9), sum(in_flight(weighed.program))


def compared(shape: Shape) -> list[Planned]:
    """Every kind that CheckFree+ could take, in the order of ``SWAPPING``."""
    return [plan(kind, shape) for kind in SWAPPING]


def best(planned: Iterable[Planned]) -> Planned:
    """The shortest that may run; of equals, the one that holds least.

    Raises:
        UserError: none may run.
    """
    valid = [each for each in planned if each.valid]
    if not valid:
        raise UserError("no schedule that swaps half of the microbatches may run here", "allow more in flight")
    return min(valid, key=lambda each: (round(each.ran.end, 9), max(each.in_flight), sum(each.in_flight)))


def _duration(f: float, b: float) -> Callable[[Unit], float]:
    return lambda unit: b if unit.backward else f


def _programs(kind: str, shape: Shape) -> Iterator[Program]:
    """What there is to choose from within a kind."""
    given = (shape.stages, shape.microbatches)
    grids = [*_GRIDS, (shape.f + shape.comm, shape.b + shape.comm)]
    if kind == "1f1b":
        yield kinds.one_f_one_b(*given)
    elif kind == "interleaved":
        yield from (kinds.interleaved(*given, shape.chunks, _duration(*grid)) for grid in grids)
    elif kind == "two-pass":
        yield kinds.two_pass(*given)
    elif kind == "half-half":
        yield from (kinds.half_half(*given, _duration(*grid)) for grid in grids)
    elif kind == "alternate":
        yield kinds.alternate(*given)
    elif kind == "woven":
        yield from _woven(shape)
    else:
        raise UserError(f"there is no schedule {kind!r}", f"give one of {', '.join((*KINDS, BEST))}")


def _woven(shape: Shape) -> Iterator[Program]:
    """Orders of several grids, each with its messages as stages meet on its grid and as they meet by the true times.

    A batch comes before nearly every unit, so that a message's time is as good as part of the unit's.
    """
    true = (shape.f + shape.comm, shape.b + shape.comm)
    routes = kinds.half_swapped(shape.stages, shape.microbatches)
    near = sorted(_SMALL, key=lambda grid: abs(grid[1] / grid[0] - shape.b / shape.f))[:2]
    for grid in dict.fromkeys((*near, (1, 2))):
        for weave in weaves(shape.stages, *grid)[:_MOST_TRIED]:
            order = orders(weave, shape.microbatches)
            for f, b in dict.fromkeys((grid, true)):
                yield meet(routes, order, _duration(f, b))[0]
