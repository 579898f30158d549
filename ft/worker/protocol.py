"""The protocol between a worker and the control plane, without I/O: which report follows which order.

The functions are coroutines, so that the simulation (``tests/simulation/control``) can run them for many workers in one
thread with a virtual clock. In production nothing suspends a coroutine: each await blocks the training thread until it
has its result, and :func:`run` carries the coroutine through.
"""

import contextlib
import hashlib
import json
import os
import queue
import sys
import traceback
from abc import abstractmethod
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import asdict
from typing import Any, TypeVar

from ft.base.errors import EpochClosed
from ft.job.messages import Close, Finish, Inherit, Inspect, Open, WorkerDone, WorkerFailed, WorkerReady, WorkerSuspects
from ft.job.parts import Seat
from ft.worker.progress import Progress

AGENT_LOST = 70
"""Exit code of a worker whose agent has died."""


class Orders:
    """The worker's queue of orders.

    Args:
        on_close: called with each ``Close``, on the thread that received it, before the order enters the queue. It
            interrupts the operations in which the training thread may be blocked.
        on_inspect: called with each ``Inspect``, on the same thread; it never enters the queue, because the training
            thread may be blocked.
        on_inherit: called with each ``Inherit``, on the same thread, before the order that opens an epoch.
    """

    def __init__(
        self,
        on_close: Callable[[Close], None],
        on_inspect: Callable[[Inspect], None] = lambda order: None,
        on_inherit: Callable[[Inherit], None] = lambda order: None,
    ):
        self._on_close, self._on_inspect, self._on_inherit = on_close, on_inspect, on_inherit
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def deliver(self, order: Any) -> None:
        """Put an order into the queue.

        If ``order`` is None, the agent has died; exit, because no other process supervises this one.
        """
        if order is None:
            sys.stderr.write("the agent of this worker is gone: ending\n")
            sys.stderr.flush()
            os._exit(AGENT_LOST)
        if isinstance(order, Inspect):
            self._on_inspect(order)
            return
        if isinstance(order, Inherit):
            self._on_inherit(order)
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


REPEAT_S = 3.0
"""Seconds until an unanswered report is sent again: longer than an answer usually takes. The receiver ignores
duplicates.
"""
_MESSAGE_LIMIT, _TRACE_LIMIT, _SUSPICION_LIMIT = 2000, 8000, 500

T = TypeVar("T")


class Member:
    """A worker's process as a member of the run: its place, what each order means for it, and the I/O that the protocol
    needs.

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
        address: host:port of the worker's snapshot server.
        footprint: (bytes that model and optimizer take of this process' heap, bytes of a snapshot), 0 if unknown.
        progress: what the training thread does, for heartbeats.
        outcome: returns how training has ended: the fields of ``WorkerDone`` from ``early`` on, as far as they apply.
    """

    address: str
    footprint: tuple[int, int] = (0, 0)
    progress: Progress
    outcome: Callable[[], Mapping[str, Any]] = dict

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

    @abstractmethod
    def send(self, report: Any) -> None:
        """Send a report to the control plane; it may be lost.

        Raises:
            OSError: the connection to the node agent is closed.
        """

    @abstractmethod
    async def next_order(self, within_s: float | None) -> Any | None:
        """Return the next order of the control plane, None if none arrives within ``within_s`` seconds (None: wait for
        ever)."""

    @abstractmethod
    async def wait_closed(self, within_s: float) -> bool:
        """Wait until the worker's epoch is closed, at most ``within_s`` seconds; return whether it is closed."""

    @abstractmethod
    def log_error(self, error: Exception) -> None:
        """Write the traceback of ``error`` to the worker's log."""


def run(steps: Coroutine[Any, Any, T]) -> T:
    """Carry out a coroutine of the protocol on the calling thread, and return its result."""
    try:
        steps.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    steps.close()
    raise RuntimeError("an operation of the protocol has suspended its coroutine outside of a simulation")


async def take_seat(member: Member) -> None:
    """Report that this worker is ready, wait for a logical rank, and enter its first epoch.

    Raises:
        SystemExit: the run is over.
    """
    member.progress.idles("waiting for a seat")
    member.send(WorkerReady(member.worker, member.node, member.address))
    await enter_next_epoch(member)
    member.progress.idles("assembling")


async def enter_next_epoch(member: Member, report: Any = None) -> None:
    """Wait for the next epoch in which the worker has a logical rank, and enter it.

    Args:
        report: report that is sent until the epoch opens; None: nothing is sent.

    Raises:
        SystemExit: the run is over, or the worker got another logical rank than before.
    """

    def has_come(order: Any) -> bool:
        if isinstance(order, Finish):
            raise SystemExit(0)
        return member.is_seated_by(order)

    member.enter(await _await(member, report, has_come))
    member.progress.epoch = member.epoch


async def await_order(member: Member, kind: type[T], report: Any = None) -> T:
    """Wait for the order of type ``kind`` for the worker's epoch, and return it; other orders are discarded.

    Args:
        report: report that is sent until the order arrives; None: nothing is sent.

    Raises:
        EpochClosed: the epoch was closed before the order arrived.
    """

    def has_come(order: Any) -> bool:
        if member.is_ended_by(order):
            raise EpochClosed(order.epoch, order.reason)
        return member.is_for(order, kind)

    found: T = await _await(member, report, has_come)
    return found


async def _await(member: Member, report: Any, has_come: Callable[[Any], bool]) -> Any:
    """Return the first order that ``has_come`` accepts. Until then, send ``report`` again and again.

    Without repetition, a lost report would make all workers wait until a timeout expires.
    """
    if report is not None:
        member.send(report)
    while True:
        order = await member.next_order(None if report is None else REPEAT_S)
        if order is None:
            repeat(member, report)
        elif has_come(order):
            return order


def repeat(member: Member, report: Any) -> None:
    """Send a report again that has had no answer."""
    with contextlib.suppress(OSError):  # the thread that receives orders detects the agent's death
        member.send(report)


async def finish(member: Member, step: int) -> None:
    """Report that the worker's training is over, and how it has ended; wait until all workers are done.

    Raises:
        EpochClosed: a failure on another worker was first, and this worker has to help with the recovery.
    """
    member.progress.idles("done")
    await await_order(member, Finish, WorkerDone(member.worker, member.epoch, step, **member.outcome()))


def failure(member: Member, step: int, error: Exception) -> WorkerFailed:
    """Return the report of an exception, and write its traceback to the worker's log.

    Args:
        step: the last committed step (all ranks have finished its optimizer update).
    """
    member.log_error(error)
    kinds = [kind.__name__ for kind in type(error).__mro__[:-1]]
    message, trace = str(error)[:_MESSAGE_LIMIT], "".join(traceback.format_exception(error))[-_TRACE_LIMIT:]
    return WorkerFailed(member.worker, member.epoch, step, kinds, message, trace)


async def report_failure(member: Member, step: int, error: Exception) -> None:
    """Report an exception to the control plane, and return when the control plane has closed the epoch.

    If the epoch is closed already, the exception is a consequence of that and is not reported. The arguments are those
    of :func:`failure`.
    """
    if isinstance(error, EpochClosed) or member.closed:
        return
    member.progress.idles("failed")
    report = failure(member, step, error)
    member.send(report)
    while not await member.wait_closed(REPEAT_S):
        repeat(member, report)


async def suspect(member: Member, what: str, error: BaseException, verdict_s: float) -> None:
    """Report that a collective or a transfer failed in an open epoch, and wait for the control plane's verdict.

    Args:
        what: name of the process group, or description of the transfer.
        verdict_s: longest wait for the control plane to close the epoch, in seconds.
    """
    member.send(WorkerSuspects(member.worker, member.epoch, what, str(error)[:_SUSPICION_LIMIT]))
    await member.wait_closed(verdict_s)
