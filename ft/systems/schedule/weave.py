"""Search for "woven" pipeline schedules of CheckFree+: periodic orders in which no stage is idle between two units.

CheckFree+ (CheckFree, section 4.3) sends normal microbatches through the stages in their order, and swapped ones
through the first two and the last two stages in swapped order. A unit is the forward (duration f) or backward (duration
b) of one microbatch on one stage. A *weave* repeats a pair of one normal and one swapped microbatch with the period T =
2 (f + b). In a period, each stage runs one forward and one backward of both kinds, which take all of its time. So,
modulo T, the four units must fill the period of every stage without overlap: they tile it.

A *way* is the list of start times of one microbatch's units, by position on its route (position p is the p-th stage
that the microbatch passes). Modulo T, a way occupies a set of time slots at each position. A swapped microbatch has the
same positions, but on other stages, so every way can be used for both kinds. A tiling consists of one way for the
normal microbatches and one way, with an offset in time, for the swapped ones; each of the two occupies exactly the
slots that the other leaves free. For every way and offset, the search computes the free slots and looks up the ways
that occupy them. This is exact and fast.

Times are whole numbers. The orders of units that result can be used with any forward and backward time.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import product
from typing import NamedTuple

from ft.systems.schedule.program import Unit, swapped


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
