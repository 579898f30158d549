"""Final checkpoint of an FT-HSDP run: one replica writes it, and no other replica exits before it is complete.

The replica that writes the checkpoint may die meanwhile, and replicas that have exited by then could not replace it. So
all replicas that have done the last step repeatedly ask the quorum server for a quorum (the set of replicas that still
exist) until the checkpoint is complete, and another one writes it if necessary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass


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
    """Decides which replicas write the final checkpoint, over consecutive quorums in which it is not complete yet."""

    def __init__(self) -> None:
        self._healthy: tuple[int, ...] = ()
        self._asked = 0

    def is_mine(self, replica: int, healthy: Sequence[int]) -> bool:
        """Return whether ``replica`` has to write the checkpoint now.

        In the first quorum, the first of the ``healthy`` replicas has to write. With every further quorum of the same
        members, the next replica has to write, too: a replica that stays in the quorums without writing may not know
        that the run ends (a signal may have reached some replicas only). All replicas count the quorums alike.
        """
        self._asked = self._asked + 1 if tuple(healthy) == self._healthy else 0
        self._healthy = tuple(healthy)
        return replica in healthy and list(healthy).index(replica) <= self._asked
