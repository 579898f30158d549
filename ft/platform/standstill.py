"""Detects processes that have stopped making progress, and pauses of the process that judges them.

Whether a process makes progress is judged by its activity and not by a time limit on its work.
"""

from collections import deque
from collections.abc import Hashable

from ft.platform import processes

_LOOK_S = 1.0
_SLACK_S = 1.0
_MOST_PAUSES = 64
MOST_IN_A_ROW = 3
"""Number of processes in a row that may be killed for making no progress; then the run ends instead of restarting."""


class Standstill:
    """Measures for how long a process and all its descendants have done nothing at all.

    Imports on a busy machine take long, but use the processor. A process that is stopped or blocked for ever uses none.
    """

    def __init__(self):
        self._seen: Hashable = None
        self._looked_at = self._for_s = 0.0

    def look(self, now: float, pid: int, said: int = 0) -> float:
        """Return the seconds without activity.

        A gap between two calls counts for at most 2 s, so that a pause of the caller does not count.

        Args:
            said: number of messages received from the process so far; a new message counts as activity.
        """
        passed = now - self._looked_at
        if self._seen is None or passed >= _LOOK_S:
            seen = (pid, said, processes.activity(pid))
            self._for_s = self._for_s + min(passed, 2 * _LOOK_S) if seen == self._seen else 0.0
            self._seen, self._looked_at = seen, now
        return self._for_s


class OwnPauses:
    """Records when a loop that judges others by their silence did not run itself.

    During a pause of the loop, others may have been silent or not: nobody looked. The process was stopped (SIGSTOP,
    ``scontrol suspend``) or its virtual machine was paused, often together with those that it judges. So it does not
    count the pause.

    Args:
        period_s: longest time between two calls of ``look`` that the loop intends, in seconds.
    """

    def __init__(self, period_s: float):
        self._longest_s = period_s + _SLACK_S
        self._looked_at: float | None = None
        self._pauses: deque[tuple[float, float]] = deque(maxlen=_MOST_PAUSES)

    def look(self, now: float) -> float:
        """Return the seconds for which the loop has not run just before ``now``, 0 if it ran as it intends."""
        last, self._looked_at = self._looked_at, now
        if last is None or now - last <= self._longest_s:
            return 0.0
        self._pauses.append((last, now))
        return now - last

    def since(self, at: float) -> float:
        """Return the seconds of all pauses after ``at``."""
        return sum(end - max(begin, at) for begin, end in self._pauses if end > at)

    def between(self, begin: float, end: float) -> float:
        """Return the seconds from ``begin`` to ``end``, without the pauses."""
        return max(0.0, end - begin - self.since(begin) + self.since(end))
