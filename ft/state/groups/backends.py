"""The backends that carry out a process group's operations: gloo for tensors in host memory, NCCL for GPU tensors.

A ``Group`` of ``ft.state.groups`` stays the same object over recoveries. Its backends are interrupted when an epoch (a
version of the assignment of workers to ranks) is closed, and connected again for the next epoch.
"""

import os
import random
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist

from ft.base.errors import FtError
from ft.platform import sockets
from ft.state.groups.abort import Abort, finish

_DEVICE_ATTEMPTS = 5

OpenStore = Callable[[], tuple[dist.Store, "Breakable"]]
"""Function that opens another connection to the rendezvous store and returns (the store, the connection)."""


class Breakable(Protocol):
    """A connection to the rendezvous store that any thread can break."""

    def break_off(self) -> None:
        """Break the connection; operations that wait for the store fail."""


class Connection:
    """A connected backend of one process group.

    Attributes:
        device_type: type of the tensors' device, "cpu" or "cuda".
        backend_type: torch's identifier of the backend.
        backend: torch's backend object, None after ``drop``.
    """

    device_type: str
    backend_type: dist.ProcessGroup.BackendType

    def __init__(self, backend: dist.Backend):
        self.backend: dist.Backend | None = backend

    def interrupt(self) -> None:
        """Make every blocked operation fail soon, without waiting for that. Safe from any thread.

        With gloo this takes milliseconds; with NCCL it takes as long as the abort.
        """
        raise NotImplementedError

    def drop(self) -> None:
        """Release the backend.

        Afterwards no operation can access a buffer, unless a ``Work`` object of the backend is still referenced.
        """
        self.backend = None


class GlooConnection(Connection):
    """A gloo backend. ``interrupt`` shuts its sockets down, as gloo has no call that aborts an operation."""

    device_type = "cpu"
    backend_type = dist.ProcessGroup.BackendType.GLOO

    def __init__(self, backend: dist.Backend, own: sockets.Sockets):
        super().__init__(backend)
        self._own = own

    def interrupt(self) -> None:
        sockets.shut(self._own)

    def break_one(self, choice: random.Random) -> None:
        """Break one TCP connection of the backend, drawn by ``choice``, for fault injection. Safe from any thread."""
        if self._own:
            descriptor = choice.choice(sorted(self._own))
            sockets.shut({descriptor: self._own[descriptor]})


class NcclConnection(Connection):
    """An NCCL backend.

    NCCL creates its communicators at the first operations. ``abort`` ends blocked operations, also on the device, but
    not the creation of a communicator (see ``NcclConnector``).

    At the beginning of that creation, NCCL waits in the store, over a separate connection. ``interrupt`` breaks that
    connection too.

    Args:
        backend: torch's backend.
        store: the backend's connection to the store.
        name: description of the backend for messages.

    Attributes:
        abort: the abort, None before ``interrupt``.
    """

    device_type = "cuda"
    backend_type = dist.ProcessGroup.BackendType.NCCL

    def __init__(self, backend: dist.Backend, store: Breakable, name: str):
        super().__init__(backend)
        self._store, self._name, self._lock = store, name, threading.Lock()
        self.abort: Abort | None = None

    def interrupt(self) -> None:
        self._store.break_off()
        with self._lock:
            if self.abort is None and self.backend is not None:
                self.abort = Abort(self.backend, self._name)


class GlooConnector:
    """Connects one group over gloo, once for each epoch in which the group is rebuilt.

    The gloo device (listening socket and I/O thread) is created once and kept, because creating it takes half of the
    time of connecting, and destroying it most of the time of disconnecting. It listens on the interfaces of
    GLOO_SOCKET_IFNAME or, if this is not set, on the address at which other nodes reach this node (FT_HOST, set by
    ``ft run``). gloo's default, the address of the host's name, is the loopback address on many machines.
    """

    device_type = "cpu"
    lazy = False  # whether gloo connects a pair of members only when an operation uses it

    def __init__(self, rank: int, size: int, timeout: timedelta):
        self._rank, self._size, self._timeout = rank, size, timeout
        self._devices: list = []
        self._listening: list[sockets.Address] = []
        self._listeners: sockets.Sockets = {}

    def connect(self, store: dist.Store, open_store: OpenStore, watch: sockets.Watch) -> Connection:
        """Rendezvous with the other members in ``store``, and connect to all of them.

        Args:
            store: store for the rendezvous, whose keys must never have been used before.
            open_store: not used for gloo.
            watch: finds the sockets that gloo opens meanwhile.

        Raises:
            RuntimeError: a member did not connect in time, or the connection to the store broke.
        """
        if not self._devices:
            self._make_devices()
        sockets.admit(self._listeners, everybody=True)
        options = dist.ProcessGroupGloo._Options()
        options._devices, options._timeout = self._devices, self._timeout
        store.set(f"at/{self._rank}", " ".join(f"{host},{port}" for host, port in self._listening))
        store.set_timeout(self._timeout)
        backend = dist.ProcessGroupGloo(store, self._rank, self._size, options)
        sockets.admit(self._listeners, everybody=False)  # all members are connected
        return GlooConnection(backend, self._find_own(watch, store))

    def _make_devices(self) -> None:
        interfaces = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
        for _ in range(_DEVICE_ATTEMPTS):
            before = sockets.held()
            if interfaces:
                devices = [
                    dist.ProcessGroupGloo.create_device(interface=name, lazy_init=self.lazy) for name in interfaces
                ]
            elif host := os.environ.get("FT_HOST"):
                devices = [dist.ProcessGroupGloo.create_device(hostname=host, lazy_init=self.lazy)]
            else:
                devices = [dist.ProcessGroupGloo.create_default_device(lazy_init=self.lazy)]
            listeners = sockets.listeners(sockets.since(before))
            if len(listeners) == len(devices):
                self._devices, self._listening = devices, sockets.listening(listeners)
                self._listeners = listeners
                return
        raise FtError("cannot tell gloo's listening socket from others: other threads keep opening theirs")

    def _find_own(self, watch: sockets.Watch, store: dist.Store) -> sockets.Sockets:
        """Return the sockets that gloo has opened, by their addresses: other threads may have opened sockets too."""
        there = store.multi_get([f"at/{rank}" for rank in range(self._size)])
        ends = [end.rsplit(",", 1) for entry in there for end in entry.decode().split()]
        expected = (self._size - 1) * len(self._devices)
        return watch.opened({(host, int(port)) for host, port in ends}, expected)


class NcclConnector:
    """Creates a group's NCCL backend, once for each epoch in which the group is rebuilt.

    NCCL creates its communicators at their first use.

    The communicators are non-blocking, so that an abort ends operations that are under way. While a communicator is
    being created, it cannot be aborted: torch holds its lock until it is ready (``NCCLComm::waitReady``, 30 minutes at
    most by default), and the abort needs that lock. A worker that waits there when a peer is lost (in its first step,
    in the first step after a recovery, or at the first use of a pair) does not leave the epoch and is replaced after
    ``Timeouts.drain_s``. Torch's watchdog must not handle errors itself (``prepare_nccl``). No GPU has run this.
    """

    device_type = "cuda"

    def __init__(self, rank: int, size: int, timeout: timedelta):
        self._rank, self._size, self._timeout = rank, size, timeout

    def connect(self, store: dist.Store, open_store: OpenStore, watch: sockets.Watch) -> Connection:
        """Create the backend without waiting for the other members.

        Args:
            store: not used for NCCL: the backend has its own connection to the store, because a group that is kept
                outlives the epoch's connection.
            open_store: opens that connection.
            watch: not used for NCCL.
        """
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = self._timeout
        options.config.blocking = 0
        own_store, breakable = open_store()
        backend = dist.ProcessGroupNCCL(own_store, self._rank, self._size, options)
        return NcclConnection(backend, breakable, f"an NCCL group of {self._size} ranks")


def prepare_gloo() -> None:
    """Make gloo look up all members with one store request instead of one request per member.

    Call it before the first connection.
    """
    os.environ.setdefault("GLOO_ENABLE_STORE_V2_API", "1")


_REQUIRED = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "torch's watchdog would end this process after a peer's failure",
    "TORCH_NCCL_DESYNC_DEBUG": "it turns the watchdog's own error handling on again",
    "TORCH_NCCL_BLOCKING_WAIT": "there would be no watchdog, which sees that operations have ended",
    "TORCH_NCCL_ENABLE_MONITORING": "a second watchdog would end this process while an abort is under way",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "a CUDA error would become SIGABRT, without the error's text",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "a failure would make workers of later epochs write dumps, and sleep",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "after an error, the watchdog would sleep and hold a lock",
    "TORCH_NCCL_EXTRA_DUMP_ON_EXEC": "every abort would begin with a dump",
}
"""Environment variables that have to be 0 -> what would happen otherwise (torch's ProcessGroupNCCL.cpp)."""


def prepare_nccl(report: Callable[[str], None] = lambda message: None) -> None:
    """Prevent torch's NCCL backend from ending or delaying the process after an error: this package handles errors.

    Call it before the first NCCL backend.

    Args:
        report: function that is called with a sentence for each setting of the site that is replaced.
    """
    # NVIDIA's in-process restart needs this too: with SHARP, a hang can raise an exception (its release notes, v0.2).
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    for name, otherwise in _REQUIRED.items():
        given = os.environ.get(name, "0")
        if given.strip().lower() not in ("0", "n", "no", "f", "false", ""):
            report(f"{name}={given} is replaced by 0: {otherwise}")
        os.environ[name] = "0"
    if dist.get_debug_level() == dist.DebugLevel.DETAIL:
        report("TORCH_DISTRIBUTED_DEBUG=DETAIL is replaced by INFO: it includes TORCH_NCCL_DESYNC_DEBUG")
        dist.set_debug_level(dist.DebugLevel.INFO)


def interrupt_together(connections: list[Connection]) -> None:
    """Interrupt all connections (``Connection.interrupt``), and wait until no device operation of theirs goes on.

    Raises:
        AbortError: a communicator was not aborted.
    """
    for one in connections:
        one.interrupt()
    finish(one.abort for one in connections if isinstance(one, NcclConnection) and one.abort is not None)


def wrap(connections: list[Connection], rank: int, size: int) -> dist.ProcessGroup:
    """Return a process group that dispatches each operation to the backend for the device of its tensors.

    A ``dist.Backend`` alone does not suffice: torch calls methods of ``dist.ProcessGroup`` that it lacks, such as
    those for coalesced operations.

    Args:
        connections: connected backends, one for each type of device.
        rank: rank of this worker within the group.
        size: number of members of the group.
    """
    inner = dist.ProcessGroup(dist.HashStore(), rank, size)
    for one in connections:
        inner._set_default_backend(one.backend_type)
        inner._register_backend(torch.device(one.device_type), one.backend_type, one.backend)
    if [one.device_type for one in connections] == ["cpu"]:
        # gloo's collectives take GPU tensors too, and copy them through host memory (``ProcessGroupGloo``).
        inner._register_backend(torch.device("cuda"), connections[0].backend_type, connections[0].backend)
    return inner
