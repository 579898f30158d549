"""The checkpoint that a run ends with: one replica writes it, and no other one leaves before it is there.

Whoever was to write it may die on the way, and those that have gone by then can write it no more. So all that have done
the last step meet in quorums of their own until it is there: the server knows who is left.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ft.job.quorum import Quorum


@dataclass(frozen=True)
class LastSave:
    """What the trainer has for it.

    Attributes:
        is_there: whether the checkpoint of a step is complete. write: saves the state at hand; collective inside the
            replica, and over when it returns.
    """

    is_there: Callable[[int], bool]
    write: Callable[[], None]


class Turns:
    """Whose turn it is to write, in one quorum after another without the checkpoint."""

    def __init__(self):
        self._healthy: tuple[int, ...] = ()
        self._asked = 0

    def is_mine(self, replica: int, healthy: Sequence[int]) -> bool:
        """The first one's; who stays without doing it has not come to its end (a signal that only some have got), so
        it is the next one's then. All that have come to it count alike."""
        self._asked = self._asked + 1 if tuple(healthy) == self._healthy else 0
        self._healthy = tuple(healthy)
        return replica in healthy and list(healthy).index(replica) <= self._asked


def is_due(replica: int, is_there: Callable[[], bool], meet: Callable[[], Quorum | None]) -> bool:
    """Whether ``replica`` is to write it now; returns when that is known.

    Args:
        meet: those that are left, with nobody waiting for one that is gone; None: there is no server any more.
    """
    turns = Turns()
    while not is_there():
        quorum = meet()
        if quorum is None:
            return True
        if quorum.finished or replica not in quorum.healthy:  # somebody has seen to it, or the run goes on
            return False
        if turns.is_mine(replica, quorum.healthy):
            return True
    return False
