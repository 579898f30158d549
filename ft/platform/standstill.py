"""Detects processes that have stopped making progress, by their activity and not by a time limit on their work."""

from collections.abc import Hashable

from ft.platform import processes

_LOOK_S = 1.0
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
            now: monotonic time.
            pid: pid of the process.
            said: number of messages received from the process so far; a new message counts as activity.
        """
        passed = now - self._looked_at
        if self._seen is None or passed >= _LOOK_S:
            seen = (pid, said, processes.activity(pid))
            self._for_s = self._for_s + min(passed, 2 * _LOOK_S) if seen == self._seen else 0.0
            self._seen, self._looked_at = seen, now
        return self._for_s
