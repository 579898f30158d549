"""``Group``: a torch process group whose connections can be aborted and remade without replacing the object.

When a worker fails, the epoch is closed: every operation of every group fails, also a blocked one. For the next epoch,
the connections are remade, while model and optimizer keep their references to the group.
"""

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from ft.base.errors import EpochClosed, UserError
from ft.faults.hang.inspection import RECV, SEND, channel
from ft.job.parts import GroupReport
from ft.net.codec import Numbers
from ft.state.groups.backends import GlooConnector, GroupConnection, NcclConnector, interrupt_together, wrap
from ft.state.groups.device import DEVICE, STALLS, Place
from ft.state.groups.local import Local
from ft.state.groups.state import EpochState
from ft.state.groups.work import GRACE_S, Batch, GroupWork, MessageFromAnyone, Opaque, SentMessage, is_send

if TYPE_CHECKING:
    from ft.state.groups.registry import Groups

_PRUNE_AT = 64
# Texts in backend errors that indicate a failed connection. All other errors at the start of an operation are bugs of
# the caller, such as tensors of wrong shape.
_TRANSPORT_WORDS = ("gloo/transport", "pair closure", "Connection ", "NCCL", "Broken pipe", "Socket ")


class Group(dist.ProcessGroup):
    """A process group of the backend ``ft``.

    ``Groups`` creates it; it can be used wherever torch expects a process group.

    Every operation raises ``EpochClosed`` once the epoch is closed, even if the operation is blocked at that moment. It
    raises ``RecoverableError`` if the operation failed and the control plane did not close the epoch because of it.

    Args:
        name: unique name of the group.
        desc: torch's description of the group.
        ranks: logical ranks of the members, in group order.
        rank: group rank of this worker.
        state: the state that all groups of this worker share.
        maker: the object that creates, connects and forgets groups; ``ft.state.groups.registry`` asks it for
            further ones.

    Attributes:
        connectors: device type ("cpu" or "cuda") -> object that connects the group for tensors on such a device. The
            first connector is used at once, the other one at the first operation on such a tensor.
        interrupted: whether an operation failed or was aborted, so that the connections cannot be used any more.
    """

    def __init__(self, name: str, desc: str, ranks: list[int], rank: int, state: EpochState, maker: "Groups"):
        super().__init__(rank, len(ranks))  # type: ignore[call-arg]  # torch's stub lacks this constructor
        self._name, self._desc, self.ranks, self.state = name, desc, Numbers(ranks), state
        self._rank, self._size, self.maker = rank, len(ranks), maker
        self.connectors: dict[str, GlooConnector | NcclConnector] = {}
        self._connections: dict[str, GroupConnection] = {}
        self._inner: dist.ProcessGroup | None = None
        self._local = Local(rank, len(ranks)) if len(ranks) == 1 or state.alone else None
        # Works that were started and whose end was not observed yet. Messages (send, receive) in host memory are weakly
        # referenced: if the program drops a message's work without waiting, it is dropped here too, as in gloo. On a
        # device an operation goes on although nobody references its work.
        self._flight: dict[int, GroupWork | weakref.ref[GroupWork]] = {}
        self._before: Place | None = None
        self._launching = threading.RLock()
        self._block: tuple[dist.ProcessGroup, torch.device, int] | None = None
        self.interrupted = self._used = False
        self._prune_at = _PRUNE_AT
        self._reset_counts()

    # --- operations ---------------------------------------------------------------------------------------------------

    # torch's stub promises a work; here an operation that is on the current stream already has none.

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int = 0) -> dist.Work | None:  # type: ignore[override]
        self._refuse_gpu_message(tensors)
        return self._start(SentMessage(self), (self._sent, dst), "send", (tensors, dst, tag), {})

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int = 0) -> dist.Work | None:  # type: ignore[override]
        self._refuse_gpu_message(tensors)
        return self._start(SentMessage(self), (self._received, src), "recv", (tensors, src, tag), {})

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int = 0) -> dist.Work | None:  # type: ignore[override]
        self._refuse_gpu_message(tensors)
        return self._start(MessageFromAnyone(self), None, "recv_anysource", (tensors, tag), {})

    def exchange(self, messages: Sequence[dist.P2POp]) -> list[dist.Work]:
        """Start sends and receives: ``torch.distributed.batch_isend_irecv``.

        Over NCCL they are one launch with one work, so that neither their order nor the peers' order matters. NCCL
        carries out what is launched alone one after the other on one stream, and a send of a large message ends only
        when it is received: two ranks that both start with a send to each other would wait forever. gloo buffers them.

        Args:
            messages: the operations, all in this group and on one device.
        """
        if self._local is None and "cuda" in self.connectors and _device_type((messages[0].tensor,)) == "cuda":
            batch = self._start(Batch(self), None, "batch_isend_irecv", (messages,), {})
            return [] if batch is None else [batch]
        works = []
        for one in messages:
            peer = {"group_dst" if is_send(one) else "group_src": one.group_peer}
            works.append(one.op(one.tensor, group=self, tag=one.tag, **peer))
        return [work for work in works if work is not None]

    def _refuse_gpu_message(self, tensors: list[torch.Tensor]) -> None:
        # gloo hands a message's address to the operating system (``ProcessGroupGloo::send``), which cannot read a GPU.
        if "cuda" not in self.connectors and tensors[0].device.type == "cuda":
            raise UserError(
                f"gloo sends no messages from GPU memory (group {self._name}); it carries out collectives only",
                "use --distributed-backend nccl, or a layout without pipeline parallelism",
            )

    def _start(
        self,
        work: GroupWork,
        tally: tuple[list[int], int] | None,
        method: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> dist.Work | None:
        """Start an operation on the connected backends, and return its work.

        Args:
            work: the work object to return.
            tally: (list, index) of the counter to increment if the operation is started, or None.
            method: name of the method of ``dist.ProcessGroup``.
            args: positional arguments of the method.
            kwargs: keyword arguments of the method.
        """
        if self._local is not None:
            return self._start_locally(method, args, kwargs)
        flight, key = self._flight, id(work)
        # The order matters: register the work, then read the flag. ``close`` sets the flag and then reads the works. So
        # either this thread sees the flag, or ``close`` sees the work.
        flight[key] = work
        state = self.state
        work.operation, work.began, work.trains = method, time.monotonic(), state.thread.trains
        try:
            if state.closed is not None:
                raise EpochClosed(*state.closed)
            inner = self._inner
            if inner is None or len(self.connectors) > 1:
                inner = self._connected_for(args, kwargs, work)
            self._used = True
            if tally is not None:
                self._count(work, tally, method, args)
            work.inner = started = work.launch(inner, method, args, kwargs)
        except EpochClosed:
            flight.pop(key, None)
            self.end_block()
            raise
        except Exception as error:
            flight.pop(key, None)
            self.end_block()
            if state.closed is not None or _is_of_transport(error):
                raise self.failure(error) from error
            raise
        if not work.on_host and torch.cuda.is_current_stream_capturing():
            flight.pop(key, None)  # it runs when the graph is replayed, and torch's watchdog never sees it
            return None if started is None else work
        if started is None:
            flight.pop(key, None)
            DEVICE.mark(self._name, method, work.began)
            STALLS.ends(self._name, self._before)
            return None
        if work.on_host and isinstance(work, SentMessage):
            flight[key] = weakref.ref(work)
        if len(flight) > self._prune_at:
            self._prune()
        return work

    def _count(self, work: GroupWork, tally: tuple[list[int], int], method: str, args: tuple[Any, ...]) -> None:
        counters, at = tally
        counters[at] += 1
        if work.trains:
            peer = None if counters is self._collectives else self.ranks[at]
            self.state.history.started(self.label, method, peer, counters[at], args, work)
        else:
            work.sequence = counters[at]

    def add_message(self, batch: GroupWork, method: str, tensor: torch.Tensor, peer: int) -> SentMessage:
        """Count a message of a batch that is about to be launched, and return its work."""
        work = SentMessage(self)
        work.operation, work.began, work.trains, work.on_host = method, batch.began, batch.trains, batch.on_host
        self._count(work, (self._sent if method == "send" else self._received, peer), method, ([tensor],))
        return work

    def _start_locally(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dist.Work | None:
        self.refuse_if_closed()
        work: dist.Work = getattr(self._local, method)(*args, **kwargs)
        return work

    def _connected_for(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], work: GroupWork | None = None
    ) -> dist.ProcessGroup:
        device_type = next(iter(self.connectors))
        if len(self.connectors) > 1:
            device_type = _device_type(args) or _device_type(tuple(kwargs.values())) or device_type
        if work is not None:
            work.on_host = device_type == "cpu"
        if self._inner is None or device_type not in self._connections:
            self.maker.await_connection(self, device_type)
        if work is not None and not work.on_host:
            self._before = STALLS.begins(work.trains)
        assert self._inner is not None  # by ``attach``
        return self._inner

    # --- called by works --------------------------------------------------------------------------------------------

    def ended(self, work: GroupWork) -> None:
        """Record that the wait for ``work`` has ended.

        With NCCL the operation may still be running; then the work stays registered until the operation ends.
        """
        if work.on_host or not work.is_unfinished():
            self._flight.pop(id(work), None)

    def received_from(self, source: int) -> None:
        self._received[source] += 1

    def failure(self, error: BaseException) -> Exception:
        """Return the exception for an operation that failed with ``error``, and mark the group as interrupted."""
        self.interrupted = True
        self.end_block()
        return self.state.error_of(self._name, self.ranks, error)

    def _works(self) -> list[tuple[int, GroupWork | None]]:
        """Return (key, work) of the operations in flight; None for a message whose work the program has dropped."""
        entries = list(self._flight.items())
        return [(key, entry() if isinstance(entry, weakref.ref) else entry) for key, entry in entries]

    def _unfinished(self) -> bool:
        if any(work is not None and work.is_unfinished() for _, work in self._works()):
            return True
        return any(name == self._name for name, _ in DEVICE.marked())

    def oldest_unfinished(self) -> tuple[str, float] | None:
        """Return (name, start in monotonic time) of the oldest work of training that has not ended, or None.

        Safe from any thread. Works of a device that have ended are forgotten here, so that each is looked at about
        once, however often this method is called.
        """
        for key, work in self._works():
            if work is None:
                continue
            if work.keeps_training():
                return work.operation, work.began
            if not work.on_host:
                self._flight.pop(key, None)
        return None

    def _prune(self) -> None:
        for key, work in self._works():
            if work is None or not work.is_unfinished():
                self._flight.pop(key, None)
        # A program can be ahead of its device by many operations; not each of them looks at all earlier ones.
        self._prune_at = max(_PRUNE_AT, 2 * len(self._flight))

    # --- connections, by the registry ---------------------------------------------------------------------------------

    @property
    def is_connected(self) -> bool:
        """Return whether the group has a connection, or needs none because its operations complete locally."""
        return self._local is not None or self._inner is not None

    @property
    def is_alone(self) -> bool:
        """Return whether the group's operations complete locally although the group has other members."""
        return self._local is not None and self._size > 1

    def attach(self, connection: GroupConnection) -> None:
        """Start using a new connection."""
        connection.launching = self._launching
        self._connections[connection.device_type] = connection
        self._inner = wrap(list(self._connections.values()), self._rank, self._size)

    def to_interrupt(self) -> list[GroupConnection]:
        """Return all connections if an operation is unfinished, so that they must be broken; otherwise none."""
        if self._local is None and self._unfinished():
            self.interrupted = True
        return list(self._connections.values()) if self.interrupted else []

    def drop(self) -> None:
        """Release the broken connections. Afterwards no earlier operation writes into a buffer."""
        works = self._works()
        remains = [self._inner, *(connection.backend for connection in self._connections.values())]
        for _, work in works:
            # What has ended by an abort is not to be told from what has ended by itself.
            if work is not None and (not work.on_host or work.is_unfinished()):
                work.inner = None  # the program may still reference the work, which would keep the connection alive
        self._flight.clear()
        self._inner = None
        for connection in self._connections.values():
            connection.drop()
        self._connections.clear()
        self.interrupted = False
        # Destroying a connection waits for gloo's threads, which may wait for an abandoned operation.
        remover = threading.Thread(target=remains.clear, name="ft-drop", daemon=True)
        remover.start()
        remover.join(GRACE_S)
        if remover.is_alive():
            self.maker.ends_later(remover)

    def prepare_rebuild(self) -> None:
        """Drop the connections, reset the counters and stop completing operations locally, before a rebuild."""
        self.drop()
        self._reset_counts()
        if self._size > 1:
            self._local = None

    def connections(self) -> list[GroupConnection]:
        return list(self._connections.values())

    def report(self) -> GroupReport:
        """Return the data that ``plan_rebuild`` needs."""
        in_flight = self.interrupted or not self.is_connected
        return GroupReport(
            name=self._name,
            ranks=self.ranks,
            used=self._used,
            in_flight=in_flight,
            collectives=self._collectives[0],
            sent={self.ranks[to]: count for to, count in enumerate(self._sent) if count},
            received={self.ranks[source]: count for source, count in enumerate(self._received) if count},
        )

    @property
    def label(self) -> str:
        """Return a name for people, which is the same on all members: torch's description, and the group's name."""
        return self._name if self._desc == "undefined" else f"{self._desc}/{self._name}"

    def counts(self) -> dict[str, int]:
        """Return the number of operations that were started since the group was connected, by channel."""
        name = self.label
        found = {channel(name, SEND, self.ranks[to]): count for to, count in enumerate(self._sent) if count}
        found |= {channel(name, RECV, self.ranks[at]): count for at, count in enumerate(self._received) if count}
        return found | {name: self._collectives[0]}

    def _reset_counts(self) -> None:
        self._collectives, self._sent, self._received = [0], [0] * self._size, [0] * self._size

    # --- torch's interface of a process group ------------------------------------------------------------------------

    @property
    def group_name(self) -> str:  # type: ignore[override]  # torch's stub has a type of its own for a name, a str
        return self._name

    @property
    def group_desc(self) -> str:
        return self._desc

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, desc: str) -> None:
        self._desc = desc

    def name(self) -> str:
        return "ft"

    _get_backend_name = name

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(device_type) for device_type in self.connectors]

    def _get_backend(self, device: torch.device) -> c10d.Backend:
        if device.type not in self.connectors:
            raise RuntimeError(f"group {self._name} has no backend for device type {device.type}")
        if device.type not in self._connections:
            self.maker.await_connection(self, device.type)
        backend = self._connections[device.type].backend
        assert backend is not None  # a connection that was dropped is in no group
        return backend

    def get_group_store(self) -> c10d.Store:
        return c10d.PrefixStore(f"{self._name}/", self.maker.store)

    def set_timeout(self, timeout: timedelta) -> None:
        if self._inner is not None:
            self._inner.set_timeout(timeout)

    def _set_sequence_number_for_group(self) -> None:
        return None

    def _get_sequence_number_for_group(self) -> int:
        return self._collectives[0]

    def _start_coalescing(self, device: torch.device) -> None:
        try:
            if self._local is None:
                inner = self._connected_for((), {})
                self._launching.acquire()
                self._block = inner, device, threading.get_ident()
                inner._start_coalescing(device)
            self.refuse_if_closed()
        except Exception:
            self.end_block()
            raise

    def _end_coalescing(self, device: torch.device) -> dist.Work | None:  # type: ignore[override]
        try:
            return self._start(GroupWork(self), (self._collectives, 0), "_end_coalescing", (device,), {})
        finally:
            if self._block is not None:
                self._block = None
                self._launching.release()

    def end_block(self) -> None:
        """End the coalescing block (operations launched together) that an exception has left open in this thread.

        torch ends it only if no exception leaves it, and would go on to collect the group's operations instead of
        starting them. NCCL's blocks belong to a thread: whatever the thread launches would only be queued, in all
        groups and also after their communicators were remade.
        """
        dist.distributed_c10d._world.pg_coalesce_state.pop(self, None)
        if self._block is None or self._block[-1] != threading.get_ident():
            return
        inner, device, _ = self._block
        self._block = None
        with contextlib.suppress(RuntimeError):  # the communicator has failed, or the block has ended
            inner._end_coalescing(device)
        self._launching.release()

    def forget_block(self) -> None:
        """End a block that an exception has left; one of another thread, which may have ended, is not waited for."""
        self.end_block()
        if self._block is not None:
            self._block, self._launching = None, threading.RLock()
            for connection in self._connections.values():
                connection.launching = self._launching

    @contextlib.contextmanager
    def launches_together(self) -> Iterator[None]:
        """Return a context in which the calling thread launches several operations together.

        An abort waits at most 1 s for such a launch. It takes longer only if NCCL connects to a lost worker meanwhile.
        """
        with self._launching:
            self.refuse_if_closed()
            yield

    def refuse_if_closed(self) -> None:
        """Raise ``EpochClosed`` if the epoch is closed for operations that need other workers."""
        if self.state.closed is not None and not self.state.alone:
            raise EpochClosed(*self.state.closed)

    def shutdown(self) -> None:
        """Destroy the group on this worker, whether or not the other members are alive."""
        self.maker.forget(self)
        interrupt_together(self.connections())
        self.drop()
        self.maker.settle()

    abort = shutdown

    def __repr__(self) -> str:
        return f"Group({self._name}, ranks={self.ranks})"


def _collective(method: str) -> Callable[..., dist.Work | None]:
    kind = Opaque if "reduce_scatter" in method else GroupWork

    def operation(self: Group, *args: Any, **kwargs: Any) -> dist.Work | None:
        return self._start(kind(self), (self._collectives, 0), method, args, kwargs)

    operation.__name__ = method
    return operation


_COLLECTIVES = (
    *(
        "broadcast",
        "allreduce",
        "allreduce_coalesced",
        "reduce",
        "allgather",
        "allgather_coalesced",
        "gather",
        "scatter",
    ),
    *("reduce_scatter", "alltoall", "barrier", "monitored_barrier"),
    *("all_gather_single", "all_gather_single_coalesced", "reduce_scatter_single", "reduce_scatter_single_coalesced"),
    "all_to_all_single",
    # names before torch 2.13
    *("_allgather_base", "allgather_into_tensor_coalesced", "_reduce_scatter_base", "reduce_scatter_tensor_coalesced"),
    "alltoall_base",
)
for _method in _COLLECTIVES:
    setattr(Group, _method, _collective(_method))


def _is_of_transport(error: Exception) -> bool:
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error) for word in _TRANSPORT_WORDS)


def _device_type(values: Sequence[Any]) -> str | None:
    """Return the device type of the first tensor among the arguments of an operation, or of a barrier's options."""
    for value in values:
        if isinstance(value, torch.Tensor):
            return value.device.type
        if isinstance(value, (list, tuple)):
            if (found := _device_type(value)) is not None:
                return found
        elif isinstance(value, dist.BarrierOptions) and value.device is not None:
            return value.device.type
    return None
