"""The real connections below a group: gloo for tensors in host memory, NCCL for those on a GPU."""

import os
import random
from collections.abc import Callable
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist

from ft.base.errors import FtError
from ft.platform import sockets

_DEVICE_ATTEMPTS = 5

OpenStore = Callable[[], tuple[dist.Store, "Breakable"]]


class Breakable(Protocol):
    """A connection to the store that can be broken off from any thread."""

    def break_off(self) -> None: ...


class Connection:
    """A connected backend."""

    device_type: str
    backend_type: dist.ProcessGroup.BackendType

    def __init__(self, backend: dist.Backend):
        self.backend: dist.Backend | None = backend

    def interrupt(self) -> None:
        """Every operation on it fails within milliseconds; from any thread. ``interrupt_together`` does several."""
        raise NotImplementedError

    def break_one(self, choice: random.Random) -> None:
        """One of its connections fails, from any thread."""
        if self._own:
            descriptor = choice.choice(sorted(self._own))
            sockets.shut({descriptor: self._own[descriptor]})

    def drop(self) -> None:
        """Afterwards no operation can touch a buffer any more, provided that no work of it is referred to."""
        self.backend = None


class GlooConnection(Connection):
    """Ends with its sockets."""

    device_type = "cpu"
    backend_type = dist.ProcessGroup.BackendType.GLOO

    def __init__(self, backend: dist.Backend, own: sockets.Sockets):
        super().__init__(backend)
        self._own = own

    def interrupt(self) -> None:
        sockets.shut(self._own)


class NcclConnection(Connection):
    """Communicators are made by the first operations; ``abort`` ends what is blocked in them, on the device too.

    Communicators under construction wait in the store, through a connection of their own.
    """

    device_type = "cuda"
    backend_type = dist.ProcessGroup.BackendType.NCCL

    def __init__(self, backend: dist.Backend, store: Breakable):
        super().__init__(backend)
        self._store = store

    def interrupt(self) -> None:
        self._store.break_off()
        if self.backend is not None:
            self.backend.abort()


class GlooConnector:
    """Connects one group over gloo, again in every epoch that asks for it.

    Its device, that is the listening socket and the thread that serves all connections, is made once and kept: half of
    the time that connecting takes, and most of what disconnecting takes, is the device's. It listens at the interfaces
    of GLOO_SOCKET_IFNAME, else at the address that the agent says others reach this node at (FT_HOST): gloo's own guess
    is what the host's name resolves to, and that is the loopback address on many a machine.
    """

    device_type = "cpu"

    def __init__(self, rank: int, size: int, timeout: timedelta):
        self._rank, self._size, self._timeout = rank, size, timeout
        self._devices: list = []
        self._listening: list[sockets.Address] = []

    def connect(self, store: dist.Store, open_store: OpenStore, watch: sockets.Watch) -> Connection:
        """Meets the other members in ``store`` (under keys never used before) and connects to all of them.

        Raises:
            RuntimeError: a member did not come in time, or the store's connection broke.
        """
        if not self._devices:
            self._make_devices()
        options = dist.ProcessGroupGloo._Options()
        options._devices, options._timeout = self._devices, self._timeout
        store.set(f"at/{self._rank}", " ".join(f"{host},{port}" for host, port in self._listening))
        store.set_timeout(self._timeout)
        backend = dist.ProcessGroupGloo(store, self._rank, self._size, options)
        return GlooConnection(backend, self._find_own(watch, store))

    def _make_devices(self) -> None:
        interfaces = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
        for _ in range(_DEVICE_ATTEMPTS):
            before = sockets.held()
            if interfaces:
                devices = [dist.ProcessGroupGloo.create_device(interface=name) for name in interfaces]
            elif host := os.environ.get("FT_HOST"):
                devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
            else:
                devices = [dist.ProcessGroupGloo.create_default_device()]
            addresses = sockets.listening(sockets.since(before))
            if len(addresses) == len(devices):
                self._devices, self._listening = devices, addresses
                return
        raise FtError("cannot tell gloo's listening socket from others: other threads keep opening theirs")

    def _find_own(self, watch: sockets.Watch, store: dist.Store) -> sockets.Sockets:
        """Of the sockets opened meanwhile, gloo's: other threads open some too."""
        there = store.multi_get([f"at/{rank}" for rank in range(self._size)])
        ends = [end.rsplit(",", 1) for entry in there for end in entry.decode().split()]
        expected = (self._size - 1) * len(self._devices)
        return watch.opened({(host, int(port)) for host, port in ends}, expected)


class NcclConnector:
    """Makes a group's NCCL backend, again in every epoch that asks for it; communicators follow with the first use.

    Written against torch's documentation of ``ProcessGroupNCCL`` and ``_abort_process_group``: communicators that do
    not block the host while they are made can be aborted meanwhile, and the watchdog must leave it to this process
    what follows an error (``prepare_nccl``).
    """

    device_type = "cuda"

    def __init__(self, rank: int, size: int, timeout: timedelta):
        self._rank, self._size, self._timeout = rank, size, timeout

    def connect(self, store: dist.Store, open_store: OpenStore, watch: sockets.Watch) -> Connection:
        """As ``GlooConnector.connect``, but waits for nobody. The connection to the store is its own: a group that is
        kept outlives the epoch's."""
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = self._timeout
        options.config.blocking = 0
        own_store, breakable = open_store()
        return NcclConnection(dist.ProcessGroupNCCL(own_store, self._rank, self._size, options), breakable)


def prepare_gloo() -> None:
    """To be called before the first gloo connection: members look each other up in one request, not in one each."""
    os.environ.setdefault("GLOO_ENABLE_STORE_V2_API", "1")


def prepare_nccl() -> None:
    """To be called before the first NCCL backend is made: this process decides what follows an error, not NCCL's
    watchdog, which would end it."""
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    os.environ.setdefault("TORCH_NCCL_ENABLE_MONITORING", "0")


def interrupt_together(connections: list[Connection]) -> None:
    """Interrupts all of them. Aborts of several NCCL communicators wait for each other unless they are grouped."""
    on_device = [one for one in connections if isinstance(one, NcclConnection)]
    for one in connections:
        if not isinstance(one, NcclConnection):
            one.interrupt()
    if not on_device:
        return
    first = on_device[0].backend
    first._group_start()
    try:
        for one in on_device:
            one.interrupt()
    finally:
        first._group_end()


def wrap(connections: list[Connection], rank: int, size: int) -> dist.ProcessGroup:
    """A ``dist.ProcessGroup`` on connected backends: it has the calls that a backend alone has not."""
    inner = dist.ProcessGroup(dist.HashStore(), rank, size)
    for one in connections:
        inner._set_default_backend(one.backend_type)
        inner._register_backend(torch.device(one.device_type), one.backend_type, one.backend)
    return inner
