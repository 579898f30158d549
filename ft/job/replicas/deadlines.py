"""How long this replica waits for others: in its ring, for those that fetch, between attempts of no use."""

import statistics
import time
from collections import deque

LONGEST_S = 60.0
"""Doubling of the wait for a fetch ends here; who asks for more gets it from the start."""

_UNKNOWN_STEP_S = 60.0
_ASIDE_S = 120.0
_LONGEST_PAUSE_S = 1800.0
_STEPS_REMEMBERED = 20


class StepTimes:
    """Of the last steps."""

    def __init__(self):
        self._each: deque[float] = deque(maxlen=_STEPS_REMEMBERED)

    def add(self, seconds: float, units: int) -> None:
        """A step of so many shards (SPARe; else 1) took so long."""
        self._each.append(seconds / units)

    def of(self, units: int) -> float | None:
        """Seconds of a step of so many shards, None before there was one."""
        return statistics.median(self._each) * units if self._each else None


def ring_wait(step_s: float | None, *, is_aside: bool) -> float:
    """For so long the ring may stand still, seconds: a hung peer is to be left behind, a slow one not.

    Args:
        step_s: of a step, None where that is not known yet. is_aside: a member may be busy with something else.
    """
    if is_aside:
        return _ASIDE_S
    return _UNKNOWN_STEP_S if step_s is None else 0.75 + 2.5 * step_s


class Pause:
    """Between attempts that are of no use yet."""

    def __init__(self):
        self._since: float | None = None

    def take(self, seconds: float) -> float | None:
        """Sleeps; 0: an attempt is of use again. Returns for how long there was none, once that is too long, and None
        until then."""
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
    """Seconds that fetches are waited for before the next update. A replica whose fetch takes more than a step would
    never come back otherwise: each time one is cut off, the next may take twice as long.

    Args:
        wait_s: what they were waited for before this update. first_s: what was asked for (``--ft-hsdp-wait``); 0: they
            never are. is_wanted: a replica is behind in this step. was_cut: a fetch was not done by then.
    """
    if not is_wanted:
        return first_s
    return max(first_s, min(LONGEST_S, 2.0 * wait_s)) if was_cut else wait_s
