"""Weave normal and swapped microbatches into periodic orders in which no stage is ever idle between two units.

One normal and one swapped microbatch are a pair, and every pair runs exactly one period T = 2 (f + b) after the
previous one. In a period each stage runs one forward and one backward of either kind, which take all its time: modulo
T, the four must tile it. A *way* is the times of one microbatch, including the delays between its units. By position,
it occupies a set of moments modulo T. The swapped kind takes the same positions on other stages, so that every way
serves both kinds, and a tiling is a way whose complement is, shifted, the swap of another way. Looking up complements
makes the search exact and fast.

Times are whole numbers; the resulting orders can then be used with any forward and backward time.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import product
from typing import NamedTuple

from ft.systems.schedule.routes import swapped
from ft.systems.schedule.units import Unit


class Way(NamedTuple):
    """Start times of one microbatch's units, by position in its route; the first forward starts at 0."""

    forwards: tuple[int, ...]
    backwards: tuple[int, ...]


class Weave(NamedTuple):
    """A normal way, a swapped way that starts ``offset`` later, and the times for which they tile the period."""

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
        """Return the time from each forward until its backward, summed over stages and kinds: the microbatches in
        flight times the period."""
        return sum(sum(way.backwards) - sum(way.forwards) for way in (self.normal, self.swapped))


_SEARCHED = 8
"""Number of stages up to which delays are searched; wider weaves grow from narrower ones by two middle stages."""
_MOST_DELAY = 12


@lru_cache(maxsize=64)
def weaves(stages: int, f: int, b: int, more: int = 2) -> tuple[Weave, ...]:
    """Return all weaves with the least delay per microbatch, or with up to ``more`` above it, by increasing ``held``.

    Args:
        stages: P >= 4.
        f: a forward's time, a small whole number.
        b: a backward's time, a small whole number.
        more: delay above the least one, in the same unit.
    """
    if stages > _SEARCHED:
        found = [wider for weave in weaves(stages - 2, f, b, more) if (wider := _wider(weave)) is not None]
    else:
        least = next((delay for delay in range(_MOST_DELAY + 1) if any(_tilings(stages, f, b, delay))), None)
        found = [] if least is None else list(_tilings(stages, f, b, least + more))
    return tuple(sorted(found, key=lambda weave: (weave.held, weave)))


def orders(weave: Weave, microbatches: int) -> list[list[Unit]]:
    """Return each stage's units by time: even microbatches normal, odd ones swapped."""
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
    """Yield pairs of ways, with at most ``delay`` each, that fill every stage's period."""
    period = 2 * (f + b)
    full = (1 << period) - 1
    route = [place.stage for place in swapped(stages)]
    by_taken: dict[tuple[int, ...], list[Way]] = {}
    for way, taken in _ways(stages, f, b, delay):
        by_taken.setdefault(taken, []).append(way)
    for taken, offset in product(by_taken, range(period)):
        # The way is used as the swapped one: on stage route[p] it occupies what it occupies at position p.
        left = [0] * stages
        for stage, moments in zip(route, taken, strict=True):
            left[stage] = full & ~_shifted(moments, offset, period)
        for normal, other in product(by_taken.get(tuple(left), ()), by_taken[taken]):
            # Either of the two kinds may be first; the orders differ, though the tiling is the same.
            yield from (Weave(normal, other, shift, f, b) for shift in (offset, offset - period))


def _ways(stages: int, f: int, b: int, delay: int) -> Iterator[tuple[Way, tuple[int, ...]]]:
    """Yield ways with at most ``delay`` that occupy no stage twice at once, and what they occupy, by position."""
    period = 2 * (f + b)
    for forwards, left in _chains(stages, f, 0, delay):
        taken = [_shifted((1 << f) - 1, start, period) for start in forwards]
        for backwards, moments in _back(taken, forwards[-1] + f, b, left, period):
            yield Way(forwards, backwards), moments


def _chains(length: int, step: int, start: int, delay: int) -> Iterator[tuple[tuple[int, ...], int]]:
    """Yield the starts of a chain of units, with at most ``delay`` between them in total, and the delay left."""
    if length == 1:
        yield (start,), delay
        return
    for waits in range(delay + 1):
        for rest, left in _chains(length - 1, step, start + step + waits, delay - waits):
            yield (start, *rest), left


def _back(
    taken: Sequence[int], earliest: int, b: int, delay: int, period: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield backwards through positions whose forwards occupy ``taken``: starts, and all occupied, by position."""
    if not taken:
        yield (), ()
        return
    for waits in range(delay + 1):
        moments = _shifted((1 << b) - 1, earliest + waits, period)
        if not moments & taken[-1]:
            for starts, others in _back(taken[:-1], earliest + waits + b, b, delay - waits, period):
                yield (*starts, earliest + waits), (*others, moments | taken[-1])


def _shifted(moments: int, by: int, period: int) -> int:
    """Return a set of moments, one bit each, shifted by ``by`` modulo the period."""
    moved = moments << by % period
    return (moved | moved >> period) & ((1 << period) - 1)


def _wider(weave: Weave) -> Weave | None:
    """Return the weave with two more middle stages, at which microbatches do not wait; None if they fit nowhere.

    Two stages add 2 f to the forward and 2 b to the backward: the units behind them move by 2 f, the later backwards by
    a whole period, so that the tiling of every other stage is unchanged.
    """
    stages = len(weave.normal.forwards)
    for at in range(2, stages - 3 + 1):
        wider = weave._replace(normal=_longer(weave.normal, at, weave), swapped=_longer(weave.swapped, at, weave))
        if all(_tiled(wider, stage) for stage in (at, at + 1)):
            return wider
    return None


def _longer(way: Way, at: int, weave: Weave) -> Way:
    """Return ``way`` with two more positions before position ``at``."""
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
