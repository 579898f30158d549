"""Deadlines of a replica: how long it waits in its ring, for replicas that fetch state, and between failing
attempts.
"""

import statistics
import time
from collections import deque

LONGEST_S = 60.0
"""Upper bound, in seconds, for doubling the wait for a fetch; a longer ``--ft-hsdp-wait`` is kept from the start."""

_UNKNOWN_STEP_S = 60.0
_ASIDE_S = 120.0
_LONGEST_PAUSE_S = 1800.0
_STEPS_REMEMBERED = 20


class StepTimes:
    """Durations of the last 20 steps."""

    def __init__(self):
        self._each: deque[float] = deque(maxlen=_STEPS_REMEMBERED)

    def add(self, seconds: float, units: int) -> None:
        """Add a step of ``units`` shards (SPARe; otherwise 1) that took ``seconds``."""
        self._each.append(seconds / units)

    def of(self, units: int) -> float | None:
        """Return the median duration of a step of ``units`` shards, in seconds; None before the first step."""
        return statistics.median(self._each) * units if self._each else None


def ring_wait(step_s: float | None, *, is_aside: bool) -> float:
    """Return the seconds for which a ring may make no progress: a hung peer must be left behind, a slow one must not.

    Args:
        step_s: duration of a step in seconds, None while unknown.
        is_aside: a member may be busy with something other than a step, such as a checkpoint.
    """
    if is_aside:
        return _ASIDE_S
    return _UNKNOWN_STEP_S if step_s is None else 0.75 + 2.5 * step_s


class Pause:
    """Pause between attempts at a step that cannot succeed yet."""

    def __init__(self):
        self._since: float | None = None

    def take(self, seconds: float) -> float | None:
        """Sleep for ``seconds``; 0 means that an attempt can succeed again.

        Returns:
            None; or, once attempts have been in vain for too long (1800 s), for how many seconds.
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
    """Return the seconds for which the next update waits for fetches, doubled each time that a fetch was cut off.

    Without the doubling, a replica whose fetch takes longer than a step would never catch up.

    Args:
        wait_s: seconds that fetches were waited for before this update.
        first_s: seconds that were configured (``--ft-hsdp-wait``); 0: updates never wait for fetches.
        is_wanted: a replica is behind in this step.
        was_cut: a fetch was cut off because it was not done in time.
    """
    if not is_wanted:
        return first_s
    return max(first_s, min(LONGEST_S, 2.0 * wait_s)) if was_cut else wait_s
