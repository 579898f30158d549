"""Connects large gloo groups without connecting every pair of members.

With lazy initialization, gloo connects a pair when an operation first uses it. One barrier then connects each member
with those at the distances 1, 2, 4, ... around the ring: at most 2 log2(n) connections. gloo's all-reduce, all-gather,
reduce-scatter, broadcast and barrier need no others. Further pairs, for example those of an all-to-all, are connected
when they are first used.
"""

from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from ft.base.errors import FtError
from ft.platform import sockets
from ft.state.groups.backends import Connection, GlooConnection, GlooConnector
from ft.state.groups.tree import FAN_OUT

MOST_IN_MESH = 2 * FAN_OUT + 1
"""Maximum number of members of a group whose pairs are all connected at once. The groups of a tree are smaller.

32 connections take less time than the lazy initialization with its barrier (measured with ``tools/bench/rebuild.py``).
"""
_SLICE = timedelta(milliseconds=20)
_BARRIER = timedelta(seconds=30)
"""Timeout of the first barrier. All its members have reached the barrier when it begins."""


def neighbours(rank: int, size: int) -> list[int]:
    """Return the members that member ``rank`` of a large group of ``size`` members is connected with at first."""
    distances = [1 << power for power in range((size - 1).bit_length())]
    return sorted({(rank + sign * distance) % size for distance in distances for sign in (1, -1)} - {rank})


def connections(size: int) -> int:
    """Return the number of connections that a member of a group of ``size`` members has before its first operation."""
    return size - 1 if size <= MOST_IN_MESH else len(neighbours(0, size))


class SparseConnection(GlooConnection):
    """A gloo backend that may connect further pairs later, so that its sockets are looked up when they are needed.

    Args:
        backend: torch's backend object.
        loops: the event loops of the backend's devices, each with the device's listening socket.
    """

    def __init__(self, backend: dist.Backend, loops: list[sockets.EventLoop]):
        super().__init__(backend, {})
        self._loops = loops

    def interrupt(self) -> None:
        for loop in self._loops:
            sockets.shut(loop.connected())

    def break_one(self, choice) -> None:
        self._own = {fd: inode for loop in self._loops for fd, inode in loop.connected().items()}
        super().break_one(choice)


class SparseGlooConnector(GlooConnector):
    """Connects one large group over gloo, once for each epoch in which the group is rebuilt.

    Each connection has gloo devices of its own: gloo ends a device that initializes lazily with its connection
    (``tcp::Context::~Context``), and counts the pairs from the device's first one (``tcp::Context::getPair``).
    """

    lazy = True

    def connect(self, store: dist.Store, watch: sockets.Watch, is_cancelled: Callable[[], bool]) -> Connection:
        """Rendezvous with the neighbours in ``store``, and connect to them.

        Raises:
            RuntimeError: a neighbour did not connect in time, the connection to the store broke, or nobody waits for
                the connection any more (``is_cancelled``).
        """
        self._devices = []
        self._make_devices()
        loops = [sockets.EventLoop.of(address) for address in self._listening]
        options = dist.ProcessGroupGloo._Options()
        options._devices, options._timeout, self._devices = self._devices, self._timeout, []
        store.set_timeout(self._timeout)
        backend = dist.ProcessGroupGloo(store, self._rank, self._size, options)
        connection = SparseConnection(backend, loops)
        store.set(f"at/{self._rank}", "")
        store.wait([f"at/{rank}" for rank in neighbours(self._rank, self._size)])
        self._meet(backend, connection, is_cancelled)
        return connection

    def _meet(self, backend: dist.Backend, connection: SparseConnection, is_cancelled: Callable[[], bool]) -> None:
        how = dist.BarrierOptions()
        how.timeout = _BARRIER
        work = backend.barrier(how)
        while True:
            try:
                work.wait(_SLICE)
                return
            except RuntimeError:
                if work.is_completed():
                    work.wait()  # the barrier has failed, or has ended just after the slice
                    return
            if is_cancelled():
                connection.interrupt()
                raise FtError("the groups are no longer to be connected")
