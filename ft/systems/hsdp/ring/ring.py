"""FT-HSDP's fault-tolerant all-reduce (FTAR) between replicas (FT-HSDP, section 4.2).

A ring connects the ranks with the same number in all replicas that take part in a training step; these replicas are the
quorum of the step, and each such rank is a member of the ring. When a replica fails or returns, the next step has
another quorum, and the ring is reconfigured without a restart of the processes.

Each member receives from its left neighbour and sends to its right neighbour. Every wait has a time limit, so that an
operation (one all-reduce) always ends, with a result or with a reason and the member that seems to be the cause.
"""

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from ft.base.errors import RecoverableError, UserError
from ft.net.streams import Network, TcpNetwork
from ft.systems.hsdp.ring import numbers
from ft.systems.hsdp.ring.blame import ASK, GIVE_UP, LEFT, RIGHT, patience
from ft.systems.hsdp.ring.connect import Dialer, Hello, RingListener, agreement, tuned
from ft.systems.hsdp.ring.flow import Reducer
from ft.systems.hsdp.ring.links import Links, Poller
from ft.systems.hsdp.ring.options import Broken, Pending, ReduceResult, RingOptions
from ft.systems.hsdp.ring.staging import when_queued

THREAD = "ft-ring"
"""Name of the ring's thread."""
_TEND_S = 1.0
_DEVICE_POLL_S = 0.001
_NOBODY = "no quorum yet"


@dataclass
class Members:
    """A job: connect the members of a quorum. See :meth:`Ring.reconfigure`.

    Attributes:
        number: number of the quorum; -1 before the first one.
    """

    number: int
    addresses: list[str]
    me: int


@dataclass
class Operation:
    """A job: one all-reduce. See :meth:`Ring.all_reduce`."""

    tensor: torch.Tensor
    scale: float
    after: Callable[[], None] | None
    pending: Pending = field(default_factory=Pending)


@dataclass(frozen=True)
class RingState:
    """What the ring is doing at one moment.

    Attributes:
        begun: number of all-reduces with other members that were begun since it was connected.
        is_busy: whether the last of them is under way.
        since_s: seconds since the connecting, or the last all-reduce, was begun.
    """

    number: int
    members: int
    connects: bool
    begun: int
    is_busy: bool
    since_s: float


class Ring:
    """One member of a ring all-reduce whose membership can change between operations.

    A background thread does all work that can take time (the jobs), in the order of the calls. :meth:`reconfigure`
    makes the connections of a quorum, which are usable until the first failure. A member that notices a failure
    notifies its neighbours and drops its connections, so that all members know of it within milliseconds. Every
    all-reduce up to the next :meth:`reconfigure` then ends at once with the reason.

    Args:
        network: network that carries the connections; a string means TCP and is the host name or address at which other
            nodes reach this node.
        token: secret shared by the processes of a run; peers that cannot prove that they know it are refused.
        options: options of the ring; the defaults if None.

    Attributes:
        address: address of this member, which the other members pass to :meth:`reconfigure`.

    Raises:
        UserError: the options are not valid.
    """

    def __init__(self, network: Network | str, token: str, options: RingOptions | None = None):
        self._options = options or RingOptions()
        self._options.check()
        self._network, self._token = TcpNetwork(network) if isinstance(network, str) else network, token
        listener, self.address = self._network.listen()
        self._wait_s, self._number = self._options.limit_s, -1
        self._poller = Poller()
        self._door = RingListener(self._poller, listener, token)
        self._reducer = Reducer(self._poller, self._options, self._pause, self._moved)
        self._links: Links | None = None
        self._members = Members(-1, [], 0)
        self._broken: Broken | BaseException | None = Broken(_NOBODY)
        self._lock = threading.Lock()
        # A job with its number in the order of submission, and its time limit in seconds.
        self._jobs: deque[tuple[Members | Operation, int, float]] = deque()
        self._submitted = self._order = 0
        self._cancelled, self._why_cancelled = 0, "its thread has ended"
        self._is_closing = False
        self._last = self._limit = self._began = 0.0
        self._thread = threading.Thread(target=self._run, name=THREAD, daemon=True)
        self._thread.start()

    def reconfigure(self, number: int, members: list[str], me: int) -> None:
        """Drop the present connections and begin to make those of quorum ``number``; return at once.

        A failure to connect is reported by the all-reduces that follow. In a ring with one member, an all-reduce only
        multiplies the tensor by its scale.

        Args:
            number: number of the quorum, greater than that of every earlier call.

        Raises:
            UserError: the number is not greater, an address occurs twice, or ``members[me]`` is not this member.
        """
        if number <= self._number:
            raise UserError(f"quorum {number} after quorum {self._number}", "numbers of quorums only grow")
        if not 0 <= me < len(members) or members[me] != self.address:
            raise UserError(
                f"member {me} of {members} is not this one, at {self.address}", "give its own index in the ring"
            )
        if len(set(members)) < len(members):
            raise UserError(f"a member is twice in {members}", "give each once")
        self._number = number
        self._submit(Members(number, list(members), me))

    def all_reduce(self, tensor: torch.Tensor, scale: float = 1.0, after: Callable[[], None] | None = None) -> Pending:
        """Start to replace ``tensor`` by the sum over all members times ``scale``; return a handle at once.

        The result has equal bits on all members. All members must pass the same number of elements, type and scale, in
        the same order of calls.

        Args:
            tensor: contiguous tensor of type fp32 or bf16 (with default options, bf16 is summed in fp32 and rounded
                once). The caller must not use it until the all-reduce is over.
            scale: factor by which the sum is multiplied.
            after: called on the ring's thread before the tensor is read; it blocks until the tensor may be read, and
                must return by itself. For a tensor on a device, it suffices that the device's current stream of the
                thread that calls it waits; None: the tensor is ready after what is queued on the current stream of
                the thread that calls this method. If it raises, the all-reduce fails on all members. On this member,
                ``Pending.wait`` then raises the same exception, or returns a failed outcome for a RecoverableError.

        Raises:
            UserError: the ring cannot reduce this tensor.
        """
        numbers.check(tensor)
        if not math.isfinite(scale):
            raise UserError(f"an all-reduce with the scale {scale}", "give a finite one")
        if after is None and tensor.device.type != "cpu":
            after = when_queued(tensor.device)
        operation = Operation(tensor, float(scale), after)
        self._submit(operation)
        return operation.pending

    def expect(self, limit_s: float) -> None:
        """Set the time limit without progress, in seconds, for all later calls.

        Time spent on waiting for other members counts as time without progress.

        Raises:
            UserError: the limit is not positive.
        """
        if not limit_s > 0:
            raise UserError(f"a limit of {limit_s} s", "give seconds above 0")
        self._wait_s = limit_s

    def inspect(self) -> RingState:
        """Return what the ring is doing. Thread-safe; returns at once.

        The values are read one by one, while the ring's thread goes on.
        """
        members, links, since_s = self._members, self._links, time.monotonic() - self._began
        if links is None:
            return RingState(members.number, len(members.addresses), False, 0, False, since_s)
        connects = links.left is None or links.right is None
        return RingState(members.number, len(members.addresses), connects, links.operation, links.busy, since_s)

    def cancel(self, reason: str) -> None:
        """End all operations submitted so far, running or not, and drop the connections. Thread-safe; returns at once.

        If the ``after`` function of an all-reduce is running, the ring's thread still waits for it to return.
        """
        with self._lock:
            self._cancelled, self._why_cancelled = self._submitted, reason
            if not self._is_closing:
                self._poller.wake()

    def close(self) -> None:
        """End all operations, close all connections and the listening socket, and wait for the thread to end."""
        with self._lock:
            if not self._is_closing:
                self._is_closing = True
                self._cancelled, self._why_cancelled = self._submitted, "the ring is closed"
                self._poller.wake()
        self._thread.join()

    def _submit(self, job: Members | Operation) -> None:
        with self._lock:
            if not self._is_closing:
                self._submitted += 1
                self._jobs.append((job, self._submitted, self._wait_s))
                self._poller.wake()
                return
        self._refuse(job)

    def _refuse(self, job: Members | Operation) -> None:
        if isinstance(job, Operation):
            job.pending.end(ReduceResult(False, "the ring is closed", skipped=True))

    # --- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while (job := self._next()) is not None:
                if isinstance(job, Members):
                    self._connect(job)
                else:
                    self._do(job)
                del job  # keep no reference to a tensor while the thread waits
        finally:
            self._end()

    def _next(self) -> Members | Operation | None:
        while True:
            self._watch_over()
            with self._lock:
                if self._jobs:
                    job, self._order, self._limit = self._jobs.popleft()
                    return job
                if self._is_closing:
                    return None
            self._poller.wait(_TEND_S)

    def _watch_over(self) -> None:
        """Close connections that broke or were cancelled between operations."""
        self._door.tend()
        if self._broken is not None:
            return
        if self._links is not None and (why := self._links.useless()):
            self._break(why)
        elif self._cancelled >= self._order and self._cancelled:
            self._break(self._cancellation())

    def _end(self) -> None:
        with self._lock:
            self._is_closing = True
            jobs, self._jobs = list(self._jobs), deque()
        for job, _, _ in jobs:
            self._refuse(job)
        self._break(self._cancellation())
        self._door.close()
        self._poller.close()

    def _break(self, why: Broken | BaseException) -> None:
        """Mark the ring of this quorum as broken, notify the neighbours, and drop the connections."""
        self._broken = why
        told = why if isinstance(why, Broken) else Broken(f"member {self._members.me} failed", self._members.me)
        if self._links is not None:
            self._links.close(told)
            self._links = None
        if self._members.number >= 0:
            self._door.give_up(self._members.number, told)

    def _cancellation(self) -> Broken:
        return Broken(self._why_cancelled, self._members.me if self._is_closing else None)

    def _check(self) -> None:
        if self._cancelled >= self._order:
            raise self._cancellation()

    def _moved(self) -> None:
        self._last = time.monotonic()
        if self._links.asked is not None:
            self._links.asked = None
        if self._cancelled >= self._order:
            raise self._cancellation()

    def _pause(self) -> None:
        """Wait for an event of the poller, for 1 s at most.

        Ping the neighbours at half of the time limit without progress, and give up at the limit.

        Raises:
            Broken: the time limit has passed, or the operation was cancelled.
        """
        now, links = time.monotonic(), self._links
        knows = links.asked is not None and links.blame()[0] is not None
        what, until = patience(now, self._last, links.asked, knows, self._limit)
        if what == GIVE_UP:
            raise links.nothing_moves(self._limit)
        if what == ASK:
            links.ask()
        self._poller.wait(min(until - now, _TEND_S))
        self._door.tend()
        self._check()

    # --- a quorum ----------------------------------------------------------------------------------------------------

    def _connect(self, members: Members) -> None:
        if self._links is not None:
            self._links.close(Broken(f"a member has gone on to quorum {members.number}"))
            self._links = None
        self._members, self._broken = members, None
        self._began = time.monotonic()
        try:
            self._check()
            if len(members.addresses) > 1:
                self._meet(members)
        except Broken as why:
            self._break(why)
        except Exception as error:
            self._break(error)

    def _meet(self, members: Members) -> None:
        options, count = self._options, len(members.addresses)
        streams = options.streams + 1
        agreed = agreement(members.addresses, *options.shared())
        left, right = (members.me - 1) % count, (members.me + 1) % count
        links = self._links = Links(self._poller)
        self._door.expect(Hello(members.number, agreed, left, 0), streams)
        dialer = Dialer(self._poller, self._network, members.addresses[right], right, self._token)
        dialer.start(Hello(members.number, agreed, members.me, 0), streams, self._limit)
        until = time.monotonic() + self._limit
        why = None
        try:
            while links.left is None or links.right is None:
                if links.right is None and (connections := dialer.taken(streams)):
                    links.join(RIGHT, right, tuned(connections, options))
                if links.left is None and len(self._door.taken) == streams:
                    came = [self._door.taken.pop(each) for each in range(streams)]
                    links.join(LEFT, left, tuned(came, options))
                if links.left is not None and links.right is not None:
                    return
                self._await_members(links, until)
        except Broken as broken:
            why = broken
            raise
        finally:
            dialer.close(why)

    def _await_members(self, links: Links, until: float) -> None:
        if (remaining := until - time.monotonic()) <= 0:
            members, count = self._members, len(self._members.addresses)
            late = (members.me + 1) % count if links.right is None else (members.me - 1) % count
            raise Broken(f"member {late} has not come to quorum {members.number} in {self._limit:g} s", late)
        self._poller.wait(min(remaining, _TEND_S))
        self._door.tend()
        self._check()
        if why := links.useless():
            raise why

    # --- an operation ------------------------------------------------------------------------------------------------

    def _do(self, operation: Operation) -> None:
        if self._cancelled >= self._order:
            operation.pending.end(ReduceResult(False, self._why_cancelled, skipped=True))
            if self._broken is None:
                self._break(self._cancellation())
            return
        if self._broken is not None:
            operation.pending.end(self._skipped())
            return
        operation.pending.end(self._outcome(operation))

    def _outcome(self, operation: Operation) -> ReduceResult | BaseException:
        tensor = operation.tensor
        try:
            self._reducer.await_ready(tensor, operation.after, self._look)
            self._reduce(tensor, operation.scale)
            return ReduceResult(True)
        except Broken as why:
            self._break(why)
            outcome = ReduceResult(False, why.reason, why.suspect)
        except RecoverableError as why:
            self._break(Broken(str(why), self._members.me))
            outcome = ReduceResult(False, str(why))
        except Exception as error:
            self._break(Broken(f"member {self._members.me} failed: {error}", self._members.me))
            outcome = error
        try:
            self._reducer.settle(tensor, self._is_given_up)
        except Exception as error:
            return error
        return outcome

    def _skipped(self) -> ReduceResult | BaseException:
        why = self._broken
        return ReduceResult(False, why.reason, why.suspect, skipped=True) if isinstance(why, Broken) else why

    def _reduce(self, tensor: torch.Tensor, scale: float) -> None:
        links, count = self._links, len(self._members.addresses)
        if links is None:
            self._reducer.scale_alone(tensor, scale)
            return
        if why := links.useless():
            raise why
        links.operation, links.busy = links.operation + 1, True
        self._last = self._began = time.monotonic()
        links.asked = None
        if tensor.numel():
            self._reducer.reduce(tensor, scale, links, self._members.me, count)
        links.busy = False

    def _look(self) -> None:
        """Look after the connections while a device has work to do before an operation. Raises Broken."""
        self._poller.wait(_DEVICE_POLL_S)
        self._door.tend()
        self._check()
        if self._links is not None and self._links.broken:
            raise self._links.broken

    def _is_given_up(self) -> bool:
        self._poller.wait(_DEVICE_POLL_S)
        return self._is_closing
