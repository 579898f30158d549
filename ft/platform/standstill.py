"""Whether a process that is waited for gets anywhere: judged by what it does, not by how long it takes."""

from collections.abc import Hashable

from ft.platform import processes

_LOOK_S = 1.0
MOST_IN_A_ROW = 3
"""So often a process that stands still is killed and started again; then the run ends."""


class Standstill:
    """For how long a process, and all below it, has done nothing at all.

    Imports on a busy machine take long, and use the processor meanwhile. A process that was stopped, or that waits for
    what never comes, does not.
    """

    def __init__(self):
        self._seen: Hashable = None
        self._looked_at = self._for_s = 0.0

    def look(self, now: float, pid: int, said: int = 0) -> float:
        """Seconds. Only time in which looks follow one another counts: who was held up itself knows of nobody else.

        Args:
            said: how many messages have come from it.
        """
        passed = now - self._looked_at
        if self._seen is None or passed >= _LOOK_S:
            seen = (pid, said, processes.activity(pid))
            self._for_s = self._for_s + min(passed, 2 * _LOOK_S) if seen == self._seen else 0.0
            self._seen, self._looked_at = seen, now
        return self._for_s
