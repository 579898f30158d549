"""Timeouts of a replica: for its gradient rings, for replicas that fetch state, and between failing attempts at a step.

A replica is a full copy of the model. The members of a step are connected in all-reduce rings; a replica that returns
after a failure fetches its state from the others during a step.
"""

import statistics
import time
from collections import deque

LONGEST_S = 60.0
"""Upper bound, in seconds, for doubling the wait for a fetch; a longer ``--ft-hsdp-wait`` is kept from the start."""

_UNKNOWN_STEP_S = 60.0
"""Timeout of a ring in seconds while the duration of a step is unknown."""
_ASIDE_S = 120.0
"""Timeout of a ring in seconds while a member may be busy with something other than a step."""
_LONGEST_PAUSE_S = 1800.0
"""Limit in seconds for attempts that keep failing."""
_STEPS_REMEMBERED = 20


class StepTimes:
    """Durations of the last 20 steps."""

    def __init__(self):
        self._each: deque[float] = deque(maxlen=_STEPS_REMEMBERED)

    def add(self, seconds: float, units: int) -> None:
        """Add a step that took ``seconds`` for ``units`` units of work.

        A unit is one shard of the batch that a replica trains in turn (a shard type of SPARe); without SPARe, a step is
        one unit.
        """
        self._each.append(seconds / units)

    def of(self, units: int) -> float | None:
        """Return the median duration of a step of ``units`` units, in seconds; None before the first step."""
        return statistics.median(self._each) * units if self._each else None


def ring_wait(step_s: float | None, *, is_aside: bool) -> float:
    """Return the seconds for which a ring may make no progress: long enough for a slow peer, but not for a hung one.

    Args:
        step_s: duration of a step in seconds, None while unknown.
        is_aside: whether a member may be busy with something other than a step, such as a checkpoint.
    """
    if is_aside:
        return _ASIDE_S
    return _UNKNOWN_STEP_S if step_s is None else 0.75 + 2.5 * step_s


class Pause:
    """Pause between attempts at a step that cannot succeed yet."""

    def __init__(self):
        self._since: float | None = None

    def take(self, seconds: float) -> float | None:
        """Sleep for ``seconds`` before the next attempt; 0 resets the limit, because an attempt can succeed again.

        Returns:
            None; or, once attempts have failed for more than 1800 s, the number of seconds for which they have failed.
        """
        now = time.monotonic()
        if not seconds:
            self._since = None
            return None
        self._since = self._since or now
        if now - self._since > _LONGEST_PAUSE_S:
            return now - self._since
        time.sleep(seconds)
        return None


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
