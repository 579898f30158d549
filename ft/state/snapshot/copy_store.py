"""All snapshots in one worker's host memory: its own, and the peer copies that it holds for other ranks.

A worker is a training process. A peer copy is a copy of the snapshot of another rank, its owner.
"""

import threading

from ft.job.messages import Holdings
from ft.state.snapshot.buffers import PingPong, Slot


class CopyStore:
    """The snapshots that this worker holds. Thread-safe.

    Attributes:
        rank: logical rank of the worker, -1 until it has one.
        own: its own snapshots.
    """

    def __init__(self):
        self.rank = -1
        self.own = PingPong()
        self._copies: dict[int, PingPong] = {}
        self._lock = threading.Lock()

    def copies(self, owner: int) -> PingPong:
        """Return the two slots for peer copies of ``owner``. Their memory is allocated when the first copy arrives."""
        with self._lock:
            return self._copies.setdefault(owner, PingPong())

    def find(self, owner: int, step: int | None = None) -> Slot | None:
        """Return the complete snapshot of ``owner`` at ``step`` (default: the newest), None if there is none."""
        if owner == self.rank:
            return self.own.find(step)
        with self._lock:
            copies = self._copies.get(owner)
        return copies.find(step) if copies else None

    def drop_after(self, step: int) -> None:
        """Drop all snapshots of steps after ``step``, which a recovery has undone."""
        with self._lock:
            everything = [self.own, *self._copies.values()]
        for snapshots in everything:
            snapshots.drop_after(step)

    def forget_before(self, epoch: int) -> list[int]:
        """Free the peer copies of owners that have sent no copy in ``epoch`` or later. Return these owners."""
        with self._lock:
            left = [owner for owner, held in self._copies.items() if held.newest_epoch() < epoch]
            gone = [self._copies.pop(owner) for owner in left]
        for snapshots in gone:
            snapshots.close()
        return left

    def holdings(self) -> Holdings:
        with self._lock:
            copies = {owner: held.steps() for owner, held in sorted(self._copies.items())}
        return Holdings(own=self.own.steps(), copies={owner: steps for owner, steps in copies.items() if steps})

    def nbytes(self) -> dict[str, int]:
        """Return host memory in bytes: {"own": ..., "copies": ...}."""
        with self._lock:
            return {"own": self.own.nbytes, "copies": sum(held.nbytes for held in self._copies.values())}

    def close(self) -> None:
        with self._lock:
            everything = [self.own, *self._copies.values()]
        for snapshots in everything:
            snapshots.close()
