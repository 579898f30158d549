"""Connects process groups in a background thread, so that waiting for a connection can be abandoned.

The wait is abandoned when the epoch is closed because of a failure. All workers connect their groups in the order of
creation. This avoids deadlock: while a worker waits in one group, no other worker waits for it in an earlier group.
"""

import threading
from collections import deque
from dataclasses import dataclass

from torch._C import _distributed_c10d as c10d

from ft.net.store import StoreConnection
from ft.platform import sockets
from ft.state import device
from ft.state.groups.group import Group

_CONNECT_S = 30.0


@dataclass(eq=False)
class ConnectionJob:
    """A connection of a group to establish, for tensors on such a device. ``done``: whether the group has it."""

    group: Group
    device_type: str
    done: bool = False


class BuildCancelled(Exception):
    """The builder was cancelled before the job was done."""


@dataclass(frozen=True)
class Rendezvous:
    """The rendezvous store of an epoch's groups.

    Attributes:
        address: address of the store's server (``StoreServer.address``).
        token: the run's secret token.
    """

    address: str
    token: str

    def connect(self) -> StoreConnection:
        """Connect to the store. This raises the same exceptions as the constructor of ``StoreConnection``."""
        return StoreConnection(self.address, self.token, _CONNECT_S)


class Builder:
    """Connects groups in the order in which their jobs are submitted, until it is cancelled.

    Args:
        prefix: prefix of all keys; it must never have been used before.
        connection: connection to the rendezvous store, which no other thread may use meanwhile.

    Attributes:
        thread: the thread that runs the jobs; it ends after ``cancel``.
        cancelled: whether ``cancel`` was called.
    """

    def __init__(self, prefix: str, connection: StoreConnection):
        self._connection = connection
        self._store = c10d.PrefixStore(prefix, connection)
        self._jobs: deque[ConnectionJob] = deque()
        self._changed = threading.Condition()
        self._watch: sockets.ConnectionWatch | None = None
        self._error: Exception | None = None
        self._busy = self.cancelled = False
        self.thread = threading.Thread(target=self._run, name="ft-groups", daemon=True)
        self.thread.start()

    def submit(self, job: ConnectionJob) -> ConnectionJob:
        """Append a job to those that wait, and return it."""
        with self._changed:
            self._jobs.append(job)
            self._changed.notify_all()
        return job

    def wait(self, job: ConnectionJob) -> None:
        """Block until the job is done.

        Raises:
            Cancelled: ``cancel`` was called.
            RuntimeError: this or an earlier job failed.
        """
        with self._changed:
            self._changed.wait_for(lambda: job.done or self.cancelled or self._error is not None)
            if job.done:
                return
            if self.cancelled:
                raise BuildCancelled
            raise RuntimeError(f"could not connect: {self._error}") from self._error

    def cancel(self) -> None:
        """Make all waiting threads return at once.

        If the builder's own thread waits in the store for another worker, its connection to the store is broken. It
        may be left behind: it ends when NCCL's wait for a communicator has ended, and has then aborted it.
        """
        with self._changed:
            if self._busy and not self.cancelled:
                self._connection.break_off()
            self.cancelled = True
            self._changed.notify_all()

    def _run(self) -> None:
        device.enter_process()
        try:
            while (job := self._next()) is not None:
                self._do(job)
        except Exception as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _next(self) -> ConnectionJob | None:
        with self._changed:
            self._busy = False
            if not self._jobs:
                self._watch = None  # sockets that other threads open before the next job do not belong to that job
            self._changed.wait_for(lambda: self._jobs or self.cancelled)
            if self.cancelled:
                return None
            self._busy = True
            return self._jobs.popleft()

    def _do(self, job: ConnectionJob) -> None:
        self._watch = self._watch or sockets.ConnectionWatch()
        store = c10d.PrefixStore(f"{job.group.group_name}/{job.device_type}", self._store)
        connection = job.group.connectors[job.device_type].connect(store, self._watch, lambda: self.cancelled)
        with self._changed:
            if self.cancelled:
                connection.interrupt()
                return
            job.group.attach(connection)
            job.done = True
            self._changed.notify_all()
