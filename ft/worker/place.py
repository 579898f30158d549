"""A worker's place in the run: its logical rank, its epoch, and whether that epoch is closed. No I/O.

A worker is a training process. A logical rank is a position in the parallel layout, which outlives processes. An epoch
is a version of the assignment of workers to logical ranks, and a seat is one entry of it: the control plane closes an
epoch after a failure (order ``Close``) and opens the next one (order ``Open``).
"""

import hashlib
import json
from dataclasses import asdict
from typing import Any

from ft.job.messages import Close, Open, Seat


class Place:
    """The place of one worker, and what each order means for it.

    Attributes:
        worker: name of the worker.
        node: name of its node agent.
        rank: logical rank, -1 before the worker has one.
        world_size: number of logical ranks.
        local_rank: index of the worker's device on its node.
        joins: whether the worker has taken over its rank in a running job, and gets its state from other ranks.
        epoch: number of the worker's epoch, open or closed; -1 before the first.
        closed_epoch: number of the newest epoch that is known to be closed, -1 if none is.
        seats: logical rank -> worker that holds it, with its addresses.
        rendezvous_address: host:port of the rendezvous store for this epoch's process groups.
        fired: numbers of the planned faults that were injected already.
    """

    def __init__(self, worker: str, node: str, world_size: int = 1):
        self.worker, self.node, self.world_size = worker, node, world_size
        self.rank = self.local_rank = self.epoch = self.closed_epoch = -1
        self.joins = False
        self.seats: dict[int, Seat] = {}
        self.rendezvous_address = ""
        self.fired: set[int] = set()

    @property
    def closed(self) -> bool:
        """Return whether the worker's epoch is closed."""
        return 0 <= self.epoch <= self.closed_epoch

    def note_close(self, order: Close) -> bool:
        """Record that an epoch is closed. Return whether that ends the worker's epoch."""
        self.closed_epoch = max(self.closed_epoch, order.epoch)
        return self.is_ended_by(order)

    def is_ended_by(self, order: Any) -> bool:
        """Return whether ``order`` closes the worker's epoch, or a later one that the worker has not entered yet."""
        return isinstance(order, Close) and order.epoch >= self.epoch

    def is_seated_by(self, order: Any) -> bool:
        """Return whether ``order`` opens an epoch after the worker's in which the worker holds a logical rank."""
        if not isinstance(order, Open) or order.epoch <= self.epoch:
            return False
        return any(seat.worker == self.worker for seat in order.seats.values())

    def is_for(self, order: Any, kind: type) -> bool:
        """Return whether ``order`` is of type ``kind`` and for the worker's epoch, or for all epochs."""
        return isinstance(order, kind) and getattr(order, "epoch", self.epoch) == self.epoch

    def enter(self, opened: Open) -> None:
        """Enter the epoch of ``opened``, in which this worker has a seat, and adopt its assignment of ranks.

        Raises:
            SystemExit: the worker got another logical rank than before. Its model does not fit that rank, so the worker
                has to be restarted.
        """
        rank = next(rank for rank, seat in opened.seats.items() if seat.worker == self.worker)
        if self.rank not in (-1, rank):
            raise SystemExit(f"seated as logical rank {rank}, assembled as {self.rank}")
        self.joins = not opened.fresh if self.epoch < 0 else self.joins
        self.rank, self.epoch = rank, opened.epoch
        self.seats = dict(opened.seats)
        self.world_size = len(self.seats)
        self.rendezvous_address = opened.rendezvous_address
        self.local_rank = self.seats[rank].local_rank
        self.fired = set(opened.fired)

    def topology(self, groups: str) -> str:
        """Return a digest of the assignment of workers to ranks and of all process groups.

        It must be equal on all workers (DEADPOOL, section V-C, invariant I1).

        Args:
            groups: digest of the names and members of all process groups.
        """
        seats = {rank: asdict(seat) for rank, seat in sorted(self.seats.items())}
        return hashlib.sha256((json.dumps(seats, sort_keys=True) + groups).encode()).hexdigest()[:16]
