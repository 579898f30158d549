"""Final checkpoint of a run: one replica writes it, and no other replica leaves before it is complete.

The replica that was to write it may die on the way, and replicas that have left by then cannot write it any more. So
all replicas that have done the last step keep meeting in quorums until it is complete; the quorum server knows which of
them are left.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ft.job.quorum import Quorum


@dataclass(frozen=True)
class LastSave:
    """The trainer's functions for the final checkpoint.

    Attributes:
        is_there: returns whether the checkpoint of a step is complete.
        write: saves the present state; collective inside the replica, and complete when it returns.
    """

    is_there: Callable[[int], bool]
    write: Callable[[], None]


class Turns:
    """Whose turn it is to write, in consecutive quorums without the checkpoint."""

    def __init__(self):
        self._healthy: tuple[int, ...] = ()
        self._asked = 0

    def is_mine(self, replica: int, healthy: Sequence[int]) -> bool:
        """Return whether ``replica`` is to write: first the first healthy replica, then also the next one after each
        quorum.

        A replica that stays in the quorums without writing has not come to its end (only some replicas have received a
        signal), so it is the next one's turn. All replicas that have come to their end count alike.
        """
        self._asked = self._asked + 1 if tuple(healthy) == self._healthy else 0
        self._healthy = tuple(healthy)
        return replica in healthy and list(healthy).index(replica) <= self._asked


def is_due(replica: int, is_there: Callable[[], bool], meet: Callable[[], Quorum | None]) -> bool:
    """Return whether ``replica`` has to write the final checkpoint; returns when that is known.

    Args:
        replica: number of this replica.
        is_there: returns whether the checkpoint is complete.
        meet: joins a quorum of the replicas that are left, without waiting for any that has gone; returns None if there
            is no server any more.
    """
    turns = Turns()
    while not is_there():
        quorum = meet()
        if quorum is None:
            return True
        if quorum.finished or replica not in quorum.healthy:  # it was written, or the run goes on
            return False
        if turns.is_mine(replica, quorum.healthy):
            return True
    return False
