"""Compute which worker held which logical rank during which interval, for the timeline of a run's report.

A logical rank is a position in the parallel grid. An epoch is a version of the map from logical ranks to workers; a new
epoch opens after every recovery.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ft.base import events
from ft.base.events import Event
from ft.record.recoveries import Recovery, seats_of


@dataclass(frozen=True)
class RankInterval:
    """The interval during which a worker held a logical rank.

    Attributes:
        rank: the logical rank.
        worker: the worker's name.
        begin: seconds from the opening of the first epoch to the start of the interval.
        end: seconds from the opening of the first epoch to the end of the interval.
        is_first: whether the worker got the rank when all workers were started together.
    """

    rank: int
    worker: str
    begin: float
    end: float
    is_first: bool


def origin(history: Sequence[Event]) -> float:
    """Return the wall time at which pictures start: the opening of the first epoch, else the first event, else 0."""
    opened = next((event for event in history if event.name == events.EPOCH_OPENED), None)
    first = opened or (history[0] if history else None)
    return first.wall if first is not None else 0.0


def rank_intervals(history: Sequence[Event], found: Sequence[Recovery]) -> list[RankInterval]:
    """Return all intervals: those that ended during the run, by end, then the last one of each rank.

    An interval that was ended by a fault ends at the time of the fault, not at the opening of the next epoch.
    """
    zero = origin(history)
    held: dict[int, tuple[str, float, bool]] = {}
    done = []
    for event in history:
        if event.name != events.EPOCH_OPENED:
            continue
        at, seats = event.wall - zero, seats_of(event)
        anew = all(worker != held.get(rank, (None,))[0] for rank, worker in seats.items())
        for rank, worker in seats.items():
            before = held.get(rank)
            if before is not None and before[0] == worker:
                continue
            if before is not None:
                end = max(before[1], _interrupted(event, found) - zero)
                done.append(RankInterval(rank, before[0], before[1], end, before[2]))
            held[rank] = (worker, at, anew)
    last = max((event.wall for event in history), default=zero) - zero
    return done + [
        RankInterval(rank, worker, begin, last, first) for rank, (worker, begin, first) in sorted(held.items())
    ]


def _interrupted(opened: Event, found: Sequence[Recovery]) -> float:
    """Return the wall time at which the epoch before ``opened`` was interrupted."""
    times = [
        r.began.wall for r in found if r.began.wall <= opened.wall and (not r.ended or opened.wall <= r.ended.wall)
    ]
    return times[-1] if times else opened.wall


def end_of_time(history: Sequence[Event], productive: float) -> float:
    """Return the number of seconds that a picture spans.

    A run that has not ended spans at least ``productive`` seconds, the time of its steps, as steps write no events.
    """
    zero = origin(history)
    last = max((event.wall for event in history), default=zero) - zero
    ended = any(event.name in (events.FINISHED, events.STOPPED) for event in history)
    return max(last if ended else max(last, productive), 1e-3)
