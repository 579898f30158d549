"""Finds stragglers: ranks whose own work in a step takes persistently longer than that of ranks with the same work.

A rank that waits for a straggler has longer steps, too, but not longer work of its own: the time in which it waits is
not compared. In each step, the time of a rank is divided by the median time of the others. A rank is late if the median
of these ratios over a window of steps is large, if it is large against the noise of the ratios, and if it is large in
both halves of the window. Medians ignore steps that are slow for once, such as those in which a rank collects garbage
or saves a checkpoint.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

WINDOW = 40
"""Number of steps that are compared. A straggler is found before it was slow for 50 steps, because the times of ten
steps are reported together."""
LATE = 1.035
"""Smallest median ratio of a straggler. It lies below 1.05 so that noise does not hide a rank that is 5 % slower."""
PUNCTUAL = 1.02
"""A straggler stops being one when its median ratio falls below this."""
_IN_EACH_HALF = 1.0 + (LATE - 1.0) / 2
_SURE = 5.0
"""Smallest distance of the median ratio from 1, in standard errors."""
_ERROR_OF_MEDIAN, _DEVIATION_OF_MAD = 1.2533, 1.4826
"""For normal noise: standard error of a median / that of a mean, and standard deviation / median absolute deviation."""


@dataclass(frozen=True)
class Pace:
    """How fast a rank works compared with the others of its role.

    Attributes:
        ratio: median over the steps of its time divided by the median time of the others.
        own_s: median time of its own work in a step, in seconds.
        usual_s: median over the steps of the median time of the others, in seconds.
        is_late: whether it is a straggler.
    """

    ratio: float
    own_s: float
    usual_s: float
    is_late: bool


def compare(times: Mapping[int, Sequence[float]]) -> dict[int, Pace]:
    """Return logical rank -> its pace.

    Args:
        times: logical rank -> time of its own work in each of the same steps, in seconds, for all ranks of one role.
            With a single rank, or with fewer than ``WINDOW`` steps, nothing can be said.
    """
    steps = min((len(own) for own in times.values()), default=0)
    if len(times) < 2 or steps < WINDOW:
        return {}
    ranks = list(times)
    usual: dict[int, list[float]] = {rank: [] for rank in ranks}
    for step in range(-WINDOW, 0):
        ordered = sorted(ranks, key=lambda rank: times[rank][step])
        for place, rank in enumerate(ordered):
            usual[rank].append(_median_of_others(ordered, place, times, step))
    return {rank: _pace(list(times[rank][-WINDOW:]), usual[rank]) for rank in ranks}


def is_punctual(pace: Pace) -> bool:
    """Return whether a rank that was a straggler is none any more."""
    return pace.ratio < PUNCTUAL


def _median_of_others(ordered: Sequence[int], place: int, times: Mapping[int, Sequence[float]], step: int) -> float:
    """Return the median time of all ranks but the one at ``place``. ``ordered``: the ranks by their times."""

    def other(index: int) -> float:
        return times[ordered[index if index < place else index + 1]][step]

    count = len(ordered) - 1
    return (other((count - 1) // 2) + other(count // 2)) / 2


def _pace(own: Sequence[float], usual: Sequence[float]) -> Pace:
    ratios = [mine / theirs if theirs > 0.0 else 1.0 for mine, theirs in zip(own, usual, strict=True)]
    ratio, half = statistics.median(ratios), len(ratios) // 2
    deviation = _DEVIATION_OF_MAD * statistics.median(abs(each - ratio) for each in ratios)
    error = _ERROR_OF_MEDIAN * deviation / len(ratios) ** 0.5
    is_late = (
        ratio >= LATE
        and ratio - 1.0 >= _SURE * error
        and min(statistics.median(ratios[:half]), statistics.median(ratios[half:])) >= _IN_EACH_HALF
    )
    return Pace(ratio, statistics.median(own), statistics.median(usual), is_late)
