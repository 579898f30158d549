"""The orders of a worker: queued for the training thread, except that a Close also takes effect at once."""

import os
import queue
import sys
from collections.abc import Callable
from typing import Any

from ft.base.errors import EpochClosed
from ft.job.messages import Close, Finish, Open

AGENT_LOST = 70
"""Exit code of a worker whose agent has died."""


class Orders:
    """The worker's queue of orders.

    Args:
        on_close: called with each Close in the thread that received it, before the training thread can see it.
    """

    def __init__(self, on_close: Callable[[Close], None]):
        self._on_close = on_close
        self._queue: queue.SimpleQueue = queue.SimpleQueue()

    def deliver(self, order: Any) -> None:
        """Queue an order. None means that the agent, this process's only supervisor, is gone: exit at once."""
        if order is None:
            sys.stderr.write("the agent of this worker is gone: ending\n")
            sys.stderr.flush()
            os._exit(AGENT_LOST)
        if isinstance(order, Close):
            self._on_close(order)
        self._queue.put(order)

    def wait_open(self, worker: str, newer_than: int) -> tuple[int, Open]:
        """Wait for an epoch after ``newer_than`` in which ``worker`` holds a logical rank.

        Returns:
            (its logical rank, the order).

        Raises:
            SystemExit: the run is over.
        """
        while True:
            order = self._queue.get()
            if isinstance(order, Finish):
                raise SystemExit(0)
            if isinstance(order, Open) and order.epoch > newer_than:
                for rank, seat in order.seats.items():
                    if seat.worker == worker:
                        return int(rank), order

    def wait(self, kind: type, epoch: int) -> Any:
        """Wait for an order of ``kind`` for ``epoch``.

        Raises:
            EpochClosed: the epoch ends before the order comes.
        """
        while True:
            order = self._queue.get()
            if isinstance(order, Close) and order.epoch >= epoch:
                raise EpochClosed(order.epoch, order.reason)
            if isinstance(order, kind) and getattr(order, "epoch", epoch) == epoch:
                return order
