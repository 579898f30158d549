"""Detects whether a process makes progress, by what it does and not by how long it takes."""

from collections.abc import Hashable

from ft.platform import processes

_LOOK_S = 1.0
MOST_IN_A_ROW = 3
"""Number of processes in a row that are killed and restarted for making no progress; after them the run ends."""


class Standstill:
    """Measures for how long a process and all its descendants have done nothing at all.

    Imports on a busy machine take long, but use the processor. A process that is stopped, or that waits for something
    that never comes, does not.
    """

    def __init__(self):
        self._seen: Hashable = None
        self._looked_at = self._for_s = 0.0

    def look(self, now: float, pid: int, said: int = 0) -> float:
        """Return the seconds without activity.

        A gap between two calls counts for at most 2 s, so that a pause of the caller does not count.

        Args:
            now: monotonic time.
            pid: the process.
            said: number of messages that have come from it.
        """
        passed = now - self._looked_at
        if self._seen is None or passed >= _LOOK_S:
            seen = (pid, said, processes.activity(pid))
            self._for_s = self._for_s + min(passed, 2 * _LOOK_S) if seen == self._seen else 0.0
            self._seen, self._looked_at = seen, now
        return self._for_s
