"""Queue of the control plane's orders to a worker process.

The agent of the node forwards the orders (``Open`` and ``Close`` of an epoch, ``Finish`` of the run, ...). They arrive
on a receiver thread and wait in the queue for the training thread. A ``Close`` also interrupts the training thread.
An epoch is a period with a fixed assignment of logical ranks to workers.
"""

import os
import queue
import sys
from collections.abc import Callable
from typing import Any

from ft.job.messages import Close, Look

AGENT_LOST = 70
"""Exit code of a worker whose agent has died."""


class Orders:
    """The worker's queue of orders.

    Args:
        on_close: called with each ``Close``, on the thread that received it, before the order enters the queue. It
            interrupts the operations in which the training thread may be blocked.
        on_look: called with each ``Look``, on the same thread; it never enters the queue, because the training thread
            may be blocked.
    """

    def __init__(self, on_close: Callable[[Close], None], on_look: Callable[[Look], None] = lambda order: None):
        self._on_close, self._on_look = on_close, on_look
        self._queue: queue.SimpleQueue = queue.SimpleQueue()

    def deliver(self, order: Any) -> None:
        """Put an order into the queue.

        If ``order`` is None, the agent has died; exit, because no other process supervises this one.
        """
        if order is None:
            sys.stderr.write("the agent of this worker is gone: ending\n")
            sys.stderr.flush()
            os._exit(AGENT_LOST)
        if isinstance(order, Look):
            self._on_look(order)
            return
        if isinstance(order, Close):
            self._on_close(order)
        self._queue.put(order)

    def next(self, within_s: float | None) -> Any | None:
        """Return the next order, None if none arrives within ``within_s`` seconds (None: wait for ever)."""
        try:
            return self._queue.get(timeout=within_s)
        except queue.Empty:
            return None
