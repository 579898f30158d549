"""Detection of a partitioned control plane: if few agents reach a control plane, it gives up its lease, so that another
can take over.
"""

from collections.abc import Mapping

from ft.job.control.timeouts import Timeouts

_A_MAJORITY = 3
"""With fewer agents than this, the other agents cannot outvote the agent on whose node the control plane runs."""


class PartitionDetector:
    """Decides when the control plane stops renewing its lease, and when it resumes because no other agent has taken
    over.

    Attributes:
        yields: while True, the lease must not be renewed, and no decision may be made because of the passing of time.
    """

    def __init__(self, timeouts: Timeouts):
        self._timeouts = timeouts
        self._until: float | None = None
        self._missed: frozenset[str] = frozenset()
        self.yields = False

    def look(self, now: float, heard_at: Mapping[str, float]) -> None:
        """Update ``yields`` at ``now`` from ``heard_at``: agent -> time at which it was last heard, in seconds.

        If most agents have been silent for ``quorum_s``, either they are gone or this control plane is partitioned from
        them. In a partition, one of these agents takes over once the lease has expired and the agents before it in the
        order have let their turns pass. If no agent takes over within that time, the silent agents are gone, and this
        control plane continues without them.
        """
        quiet = frozenset(node for node, at in heard_at.items() if now - at > self._timeouts.quorum_s)
        if 2 * len(quiet) <= len(heard_at) or len(heard_at) < _A_MAJORITY:
            self.yields, self._until, self._missed = False, None, frozenset()
        elif quiet <= self._missed:
            self.yields = False
        elif self._until is None:
            turns = self._timeouts.turn_s * (len(heard_at) + 1)
            self.yields, self._until = True, now + self._timeouts.lease_s + turns + self._timeouts.contact_s
        elif now > self._until:
            self.yields, self._until, self._missed = False, None, quiet
