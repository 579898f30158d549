"""Timeouts of a replica: for its gradient rings, and for replicas that fetch state during a step."""

import statistics
from collections import deque
from dataclasses import dataclass

LONGEST_S = 60.0
"""Upper bound, in seconds, for doubling the wait for a fetch; a longer ``--ft-hsdp-wait`` is kept from the start."""

_STEPS_REMEMBERED = 20


class LastDurations:
    """Durations of the last 20 steps."""

    def __init__(self) -> None:
        self._each: deque[float] = deque(maxlen=_STEPS_REMEMBERED)

    def add(self, seconds: float, units: float) -> None:
        """Add a step that took ``seconds`` for ``units`` units of work.

        A unit is one shard of the batch that a replica trains in turn (a shard type of SPARe); without SPARe, a step is
        one unit.
        """
        self._each.append(seconds / units)

    def of(self, units: float) -> float | None:
        """Return the median duration of a step of ``units`` units, in seconds; None before the first step."""
        return statistics.median(self._each) * units if self._each else None


@dataclass(frozen=True)
class RingLimits:
    """Time limits of a gradient ring, in seconds.

    Attributes:
        unknown_s: limit while the duration of a step is unknown.
        aside_s: limit while a member may be busy with something other than a step.
        least_s: limit of a step without duration; 2.5 times the duration of a step is added.
    """

    unknown_s: float = 60.0
    aside_s: float = 120.0
    least_s: float = 0.75

    def wait(self, step_s: float | None, *, is_aside: bool) -> float:
        """Return the seconds for which a ring may make no progress: long enough for a slow peer, not for a hung one.

        Args:
            step_s: duration of a step in seconds, None while unknown.
            is_aside: whether a member may be busy with something other than a step, such as a checkpoint.
        """
        if is_aside:
            return self.aside_s
        return self.unknown_s if step_s is None else self.least_s + 2.5 * step_s


def fetch_wait(wait_s: float, first_s: float, *, is_wanted: bool, was_cut: bool) -> float:
    """Return the seconds for which the next optimizer update waits for fetches of state.

    The time is doubled each time that a fetch was aborted. Otherwise a replica whose fetch takes longer than a step
    would never catch up.

    Args:
        wait_s: seconds that this update has waited for fetches.
        first_s: configured number of seconds (``--ft-hsdp-wait``); 0: updates never wait for fetches.
        is_wanted: whether a replica is behind in this step and fetches state.
        was_cut: whether a fetch was aborted because it was not done in time.
    """
    if not is_wanted:
        return first_s
    return max(first_s, min(LONGEST_S, 2.0 * wait_s)) if was_cut else wait_s
