"""Plan a schedule of a kind, with its program, cost and validity, or the cheapest valid one of several kinds."""

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
"""Forward and backward times in whole numbers with which messages are placed. The true times only decide between the
resulting programs."""
_SMALL = ((2, 1), (1, 1), (1, 2), (1, 3))
"""Those of them with short periods, for which all weaves are found quickly."""
_MOST_TRIED = 12
"""Number of weaves tried for each grid: those that hold the fewest microbatches, also the shortest ones."""
_OFF = (0.9, 1.1)


@dataclass(frozen=True)
class Shape:
    """The requested shape of a pipeline.

    Args:
        stages: P.
        microbatches: M, of one iteration.
        f: time of a stage's forward of one microbatch, all chunks together. All times are in one arbitrary unit.
        b: time of a stage's backward of one microbatch, all chunks together.
        comm: time of a message.
        chunks: model chunks per stage, for interleaved.
        most_in_flight: number of microbatches whose activations a stage may hold at once; None for no limit.

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
    """A schedule with its cost. ``chunks``: model chunks per stage. ``findings``: results of the check."""

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
        """Return the share of the iteration in which a stage runs no unit, equal on all; None on deadlock."""
        if self.ran.stuck:
            return None
        return 1 - self.shape.microbatches * (self.shape.f + self.shape.b) / self.ran.end

    @property
    def in_flight(self) -> list[float]:
        """Return for each stage the maximum number of microbatches whose activations it holds; a chunk counts as its
        share of one."""
        return [held / self.chunks for held in in_flight(self.program)]


def plan(kind: str, shape: Shape) -> Planned:
    """Return the cheapest program of a kind, checked. It is invalid if the kind has no valid program.

    Raises:
        UserError: there is no schedule of this kind and shape, or for ``best`` no valid one.
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
    """A program and its cost. Costs compare first by excessive memory and deadlock, then by time, then by memory."""

    cost: tuple
    program: Program
    ran: Ran


def _weigh(shape: Shape, chunks: int, program: Program) -> _Weighed:
    ran = run(program, _duration(shape.f / chunks, shape.b / chunks), shape.comm)
    most = max(in_flight(program))
    too_much = shape.most_in_flight is not None and most > shape.most_in_flight * chunks
    return _Weighed((too_much, bool(ran.stuck), round(ran.end, 9), most), program, ran)


def _off(shape: Shape, chunks: int, weighed: _Weighed) -> tuple[float, int]:
    """Return the total duration with backwards a tenth shorter and a tenth longer than given, then the sum of what
    stages hold."""
    ends = (run(weighed.program, _duration(shape.f / chunks, b * shape.b / chunks), shape.comm).end for b in _OFF)
    return round(sum(ends), 9), sum(in_flight(weighed.program))


def compared(shape: Shape) -> list[Planned]:
    """Return a plan of every kind that CheckFree+ could use, in the order of ``SWAPPING``."""
    return [plan(kind, shape) for kind in SWAPPING]


def best(planned: Iterable[Planned]) -> Planned:
    """Return the shortest valid schedule; of equals, the one that holds the fewest microbatches.

    Raises:
        UserError: none is valid.
    """
    valid = [each for each in planned if each.valid]
    if not valid:
        raise UserError("no schedule that swaps half of the microbatches may run here", "allow more in flight")
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
    """Yield programs for orders of several grids, each with the messages placed by the times of its grid and by the
    true times.

    A batch precedes nearly every unit, so the time of a message is treated as part of the unit's.
    """
    true = (shape.f + shape.comm, shape.b + shape.comm)
    routes = kinds.half_swapped(shape.stages, shape.microbatches)
    near = sorted(_SMALL, key=lambda grid: abs(grid[1] / grid[0] - shape.b / shape.f))[:2]
    for grid in dict.fromkeys((*near, (1, 2))):
        for weave in weaves(shape.stages, *grid)[:_MOST_TRIED]:
            order = orders(weave, shape.microbatches)
            for f, b in dict.fromkeys((grid, true)):
                yield meet(routes, order, _duration(f, b))[0]
