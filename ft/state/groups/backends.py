"""The backends that carry out a process group's operations: gloo for tensors in host memory, NCCL for GPU tensors.

A ``Group`` of ``ft.state.groups`` stays the same object over recoveries. Its backends are interrupted when an epoch is
closed, and connected again for the next epoch.
"""

import os
import random
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from ft.base.errors import FtError
from ft.platform import releases, sockets
from ft.state.groups.device import DEVICE
from ft.state.groups.tree import FAN_OUT

_DEVICE_ATTEMPTS = 5
MOST_IN_MESH = 2 * FAN_OUT + 1
"""Maximum number of members of a group whose pairs are all connected at once. The groups of a tree are smaller.

32 connections take less time than the lazy initialization with its barrier (measured with ``tools/bench/rebuild.py``).
"""
_LAUNCH_S = 1.0
"""Longest wait of an abort for a thread that launches several operations as one. It takes well below 1 ms, unless NCCL
connects to another rank meanwhile."""
_SLICE = timedelta(milliseconds=20)
_BARRIER = timedelta(seconds=30)
"""Timeout of the first barrier. All its members have reached the barrier when it begins."""


class AbortError(FtError):
    """A communicator was not aborted, so that its device may still write into buffers: this process must end."""


class GroupConnection:
    """A connected backend of one process group.

    Attributes:
        device_type: type of the tensors' device, "cpu" or "cuda".
        backend_type: torch's identifier of the backend.
        backend: torch's backend object, None after ``drop``.
        launching: lock that a thread holds while it launches several operations of the group as one; None before the
            group has this connection.
    """

    device_type: str
    backend_type: dist.ProcessGroup.BackendType
    launching: "threading.RLock | None" = None

    def __init__(self, backend: c10d.Backend):
        self.backend: c10d.Backend | None = backend

    def interrupt(self) -> None:
        """Make every blocked operation fail soon, without waiting for that. Safe from any thread.

        With gloo they fail within milliseconds; with NCCL it takes as long as the abort.
        """
        raise NotImplementedError

    def drop(self) -> None:
        """Release the backend.

        Afterwards no operation can access a buffer, unless a ``Work`` object of the backend is still referenced.
        """
        self.backend = None


class GlooConnection(GroupConnection):
    """A gloo backend. ``interrupt`` shuts its sockets down, as gloo has no call that aborts an operation.

    Args:
        backend: torch's backend.
        own: function that returns the sockets of the backend, which may connect further pairs later.
    """

    device_type = "cpu"
    backend_type = dist.ProcessGroup.BackendType.GLOO

    def __init__(self, backend: c10d.Backend, own: Callable[[], sockets.Sockets]):
        super().__init__(backend)
        self._own = own

    def interrupt(self) -> None:
        sockets.shut(self._own())

    def break_one(self, choice: random.Random) -> None:
        """Break one TCP connection of the backend, drawn by ``choice``, for fault injection. Safe from any thread."""
        if own := self._own():
            descriptor = choice.choice(sorted(own))
            sockets.shut({descriptor: own[descriptor]})


class NcclConnection(GroupConnection):
    """An NCCL backend with its communicator. ``interrupt`` begins the abort, which ends operations on the device.

    ``ncclCommAbort`` of one communicator may wait for kernels of another one: NCCL's documentation asks for the aborts
    of all communicators of a device within one group. A group of NCCL belongs to one thread, and
    ``ProcessGroupNCCL.abort`` makes its own in a new thread (``abortCommsFromMap``). So the aborts of several backends
    are called at the same time, each from a thread of its own.

    Args:
        backend: torch's backend.
        name: description of the backend for messages.
        abort_s: limit for the abort, in seconds.
    """

    device_type = "cuda"
    backend_type = dist.ProcessGroup.BackendType.NCCL

    def __init__(self, backend: c10d.Backend, name: str, abort_s: float):
        super().__init__(backend)
        self._name, self._abort_s, self._lock = name, abort_s, threading.Lock()
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._deadline = 0.0

    def interrupt(self) -> None:
        with self._lock:
            if self._thread is None and self.backend is not None:
                has_works = self.launching is not None
                if has_works:
                    DEVICE.aborts_begin()
                self._deadline = time.monotonic() + self._abort_s
                args = self.backend, has_works
                self._thread = threading.Thread(target=self._abort, args=args, name="ft-abort", daemon=True)
                self._thread.start()

    def problem(self) -> str | None:
        """Wait for the end of the abort. Return why the communicator may still run, or None."""
        if self._thread is None:
            return None
        self._thread.join(max(0.0, self._deadline - time.monotonic()))
        if self._thread.is_alive():
            return f"the abort of {self._name} did not end after {self._abort_s:g} s"
        return None if self._error is None else f"the abort of {self._name} failed: {str(self._error).strip()}"

    def _abort(self, backend: c10d.Backend, has_works: bool) -> None:
        # A launch of several operations that is under way would go on to use the communicator after it was freed. No
        # further one begins in an epoch that is closed.
        if self.launching is not None and self.launching.acquire(timeout=_LAUNCH_S):
            self.launching.release()
        try:
            backend.abort()
        except Exception as error:
            self._error = error
        finally:
            if has_works:
                DEVICE.aborts_ended()


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
        self._devices: list[c10d.ProcessGroupGloo.Device] = []
        self._listening: list[sockets.Address] = []
        self._listeners: sockets.Sockets = {}

    def connect(
        self, store: c10d.Store, watch: sockets.ConnectionWatch, is_cancelled: Callable[[], bool]
    ) -> GroupConnection:
        """Rendezvous with the other members in ``store``, and connect to all of them.

        Args:
            store: store for the rendezvous, whose keys must never have been used before.
            watch: finds the sockets that gloo opens meanwhile.
            is_cancelled: not used here: the wait ends when the store's connection is broken.

        Raises:
            RuntimeError: a member did not connect in time, or the connection to the store broke.
        """
        if not self._devices:
            self._make_devices()
        sockets.admit(self._listeners, everybody=True)
        gloo: Any = dist.ProcessGroupGloo  # whose stub lacks the options
        options = gloo._Options()
        options._devices, options._timeout = self._devices, self._timeout
        store.set(f"at/{self._rank}", " ".join(f"{host},{port}" for host, port in self._listening))
        store.set_timeout(self._timeout)
        backend = gloo(store, self._rank, self._size, options)
        sockets.admit(self._listeners, everybody=False)  # all members are connected
        own = self._find_own(watch, store)
        return GlooConnection(backend, lambda: own)

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

    def _find_own(self, watch: sockets.ConnectionWatch, store: c10d.Store) -> sockets.Sockets:
        """Return the sockets that gloo has opened, by their addresses: other threads may have opened sockets too."""
        there = store.multi_get([f"at/{rank}" for rank in range(self._size)])
        ends = [end.rsplit(",", 1) for entry in there for end in entry.decode().split()]
        expected = (self._size - 1) * len(self._devices)
        return watch.opened({(host, int(port)) for host, port in ends}, expected)


def neighbours(rank: int, size: int) -> list[int]:
    """Return the members that member ``rank`` of a large group of ``size`` members is connected with at first."""
    distances = [1 << power for power in range((size - 1).bit_length())]
    return sorted({(rank + sign * distance) % size for distance in distances for sign in (1, -1)} - {rank})


def connections(size: int) -> int:
    """Return the number of connections that a member of a group of ``size`` members has before its first operation."""
    return size - 1 if size <= MOST_IN_MESH else len(neighbours(0, size))


class SparseGlooConnector(GlooConnector):
    """Connects one large group over gloo without connecting every pair, once for each epoch in which it is rebuilt.

    With lazy initialization, gloo connects a pair when an operation first uses it. One barrier then connects each
    member with those at the distances 1, 2, 4, ... around the ring: at most 2 log2(n) connections. gloo's all-reduce,
    all-gather, reduce-scatter, broadcast and barrier need no others.

    Each connection has gloo devices of its own: gloo ends a device that initializes lazily with its connection
    (``tcp::Context::~Context``), and counts the pairs from the device's first one (``tcp::Context::getPair``).
    """

    lazy = True

    def connect(
        self, store: c10d.Store, watch: sockets.ConnectionWatch, is_cancelled: Callable[[], bool]
    ) -> GroupConnection:
        """Rendezvous with the neighbours in ``store``, and connect to them.

        Raises:
            RuntimeError: a neighbour did not connect in time, the connection to the store broke, or nobody waits for
                the connection any more (``is_cancelled``).
        """
        self._devices = []
        self._make_devices()
        loops = [sockets.EventLoop.of(address) for address in self._listening]
        gloo: Any = dist.ProcessGroupGloo  # whose stub lacks the options
        options = gloo._Options()
        options._devices, options._timeout, self._devices = self._devices, self._timeout, []
        store.set_timeout(self._timeout)
        backend = gloo(store, self._rank, self._size, options)
        connection = GlooConnection(
            backend, lambda: {fd: inode for loop in loops for fd, inode in loop.connected().items()}
        )
        store.set(f"at/{self._rank}", "")
        store.wait([f"at/{rank}" for rank in neighbours(self._rank, self._size)])
        self._meet(backend, connection, is_cancelled)
        return connection

    def _meet(self, backend: Any, connection: GlooConnection, is_cancelled: Callable[[], bool]) -> None:
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


class NcclConnector:
    """Creates a group's NCCL backend with its communicator, once for each epoch in which the group is rebuilt.

    The communicator is made here, in the builder's thread, and not by the group's first operation. Torch holds a
    communicator's lock until it is ready (``NCCLComm::waitReady``), and an abort needs that lock: a training thread
    that waited inside torch could not leave the epoch if a member was lost meanwhile. It waits in Python instead
    (``Builder.wait``). A builder's thread that is cancelled is left behind with a communicator that nobody else knows,
    and aborts it when torch's wait has ended, after ``Timeouts.launch_s`` at most.

    A communicator that is made in advance carries out the group's messages too; torch then makes none for each pair
    (``ProcessGroupNCCL::eagerConnectSingleDevice``). Torch's watchdog must not handle errors itself
    (``prepare_nccl``). No GPU has run this.

    Args:
        rank: rank of this worker within the group.
        size: number of members of the group.
        timeout: longest duration of an operation.
        abort_s: limit for an abort, in seconds.
        identity: (name, global ranks of the members) of the group, for NCCL's log and torch's flight recorder.
        given: the program's options (``pg_options``), which are used for each backend; None: the defaults.
    """

    device_type = "cuda"

    def __init__(
        self,
        rank: int,
        size: int,
        timeout: timedelta,
        abort_s: float,
        identity: tuple[str, list[int]] | None = None,
        given: Any = None,
    ):
        self._rank, self._size, self._timeout, self._abort_s = rank, size, timeout, abort_s
        self._identity, self._given = identity, given

    def connect(
        self, store: c10d.Store, watch: sockets.ConnectionWatch, is_cancelled: Callable[[], bool]
    ) -> GroupConnection:
        """Create the backend and its communicator, together with the other members (:meth:`GlooConnector.connect`).

        ``watch`` is not used. ``is_cancelled`` returns whether nobody waits for the communicator any more.

        Raises:
            RuntimeError: a member did not join, or the connection to the store broke.
        """
        nccl: Any = dist.ProcessGroupNCCL  # which torch has on GPUs only
        options = nccl.Options() if self._given is None else self._given
        if self._identity is not None:
            options.group_name, options.global_ranks_in_group = self._identity
        options._timeout = self._timeout
        options.config.blocking = 0  # an abort ends operations that are under way
        store.set_timeout(self._timeout)  # of the wait for the first member, which may create its context only now
        backend = nccl(store, self._rank, self._size, options)
        connection = NcclConnection(backend, f"an NCCL group of {self._size} ranks", self._abort_s)
        device = torch.device("cuda", torch.cuda.current_device())
        try:
            backend.eager_connect_single_device(device)
            self._await_readiness(backend, device, is_cancelled)
        except Exception:
            connection.interrupt()
            raise
        return connection

    def _await_readiness(self, backend: Any, device: torch.device, is_cancelled: Callable[[], bool]) -> None:
        """Wait until the communicator is ready: an operation on no elements waits for that, and launches nothing."""
        deadline = time.monotonic() + self._timeout.total_seconds()
        while True:
            try:
                backend.allreduce([torch.empty(0, device=device)])
                return
            except RuntimeError as error:  # torch's own wait has a limit that is too short for large groups
                if "NCCL timeout" not in str(error) or is_cancelled() or time.monotonic() > deadline:
                    raise


_WAIT = "TORCH_NCCL_NONBLOCKING_TIMEOUT"
_REQUIRED = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "torch's watchdog would end this process after a peer's failure",
    "TORCH_NCCL_DESYNC_DEBUG": "it turns the watchdog's own error handling on again",
    "TORCH_NCCL_BLOCKING_WAIT": "there would be no watchdog, which sees that operations have ended",
    "TORCH_NCCL_ENABLE_MONITORING": "a second watchdog would end this process while an abort is under way",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "a CUDA error would become SIGABRT, without the error's text",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "a failure would make workers of later epochs write dumps, and sleep",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "after an error, the watchdog would sleep and hold a lock",
    "TORCH_NCCL_EXTRA_DUMP_ON_EXEC": "every abort would begin with a dump",
    "TORCH_NCCL_PROPAGATE_ERROR": "the watchdog would use the rendezvous store, which belongs to another thread",
}
"""Environment variables that have to be 0 -> what would happen otherwise (torch's ProcessGroupNCCL.cpp)."""


def prepare_nccl(launch_s: float, report: Callable[[str], None] = lambda message: None) -> None:
    """Prevent torch's NCCL backend from ending or delaying the process after an error: this package handles errors.

    Call it before the first NCCL backend.

    Args:
        launch_s: limit for a wait inside torch until NCCL has taken an operation, in seconds. At the first operations,
            NCCL connects to other ranks meanwhile. Torch does not notice an abort before this limit: it goes on to ask
            for the state of the communicator, which is gone (``C10D_NCCL_CHECK_TIMEOUT``, torch 2.13).
        report: function that is called with a sentence for each setting of the site that is replaced, and for each
            known fault of the releases of NCCL, torch, Transformer Engine and the driver.
    """
    # NVIDIA's in-process restart needs this too: with SHARP, a hang can raise an exception (its release notes, v0.2).
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    # NCCL's own service for diagnosis may crash the process (``ft.platform.releases``).
    os.environ.setdefault("NCCL_RAS_ENABLE", "0")
    # torch's flight recorder keeps the events of operations that were not queued because of an abort; a dump would read
    # them after they are gone.
    if not {"TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"} & set(os.environ):
        os.environ |= {"TORCH_FR_BUFFER_SIZE": "0", "TORCH_NCCL_TRACE_BUFFER_SIZE": "0"}
    if dist.is_nccl_available():
        found = {**releases.installed(), releases.NCCL: torch.cuda.nccl.version()}
        for fault in releases.known_faults(found, os.environ):
            report(fault)
    limit = str(max(1, int(launch_s)))
    if os.environ.setdefault(_WAIT, limit) != limit:
        report(f"{_WAIT}={os.environ[_WAIT]} is replaced by {limit}, the timeout launch_s (--limits)")
        os.environ[_WAIT] = limit
    for name, otherwise in _REQUIRED.items():
        given = os.environ.get(name, "0")
        if given.strip().lower() not in ("0", "n", "no", "f", "false", ""):
            report(f"{name}={given} is replaced by 0: {otherwise}")
        os.environ[name] = "0"
    if c10d.get_debug_level() == c10d.DebugLevel.DETAIL:
        report("TORCH_DISTRIBUTED_DEBUG=DETAIL is replaced by INFO: it includes TORCH_NCCL_DESYNC_DEBUG")
        c10d.set_debug_level(c10d.DebugLevel.INFO)


def interrupt_together(connections: list[GroupConnection]) -> None:
    """Interrupt all connections (``GroupConnection.interrupt``), and wait until no device operation of theirs goes on.

    Raises:
        AbortError: the abort of a communicator has failed or not ended in time. All others were waited for.
    """
    for one in connections:
        one.interrupt()
    found = [one.problem() for one in connections if isinstance(one, NcclConnection)]
    if problems := [problem for problem in found if problem is not None]:
        raise AbortError("; ".join(problems))


def wrap(connections: list[GroupConnection], rank: int, size: int) -> dist.ProcessGroup:
    """Return a process group that dispatches each operation to the backend for the device of its tensors.

    A ``c10d.Backend`` alone does not suffice: torch calls methods of ``dist.ProcessGroup`` that it lacks, such as
    those for coalesced operations.

    Args:
        connections: connected backends, one for each type of device.
        rank: rank of this worker within the group.
        size: number of members of the group.
    """
    inner = dist.ProcessGroup(c10d.HashStore(), rank, size)
    for one in connections:
        inner._set_default_backend(one.backend_type)
        inner._register_backend(torch.device(one.device_type), one.backend_type, one.backend)
    if [one.device_type for one in connections] == ["cpu"]:
        # gloo's collectives take GPU tensors too, and copy them through host memory (``ProcessGroupGloo``).
        inner._register_backend(torch.device("cuda"), connections[0].backend_type, connections[0].backend)
    return inner
