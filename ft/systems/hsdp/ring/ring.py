"""Public interface of FT-HSDP's fault-tolerant all-reduce (FTAR) between replicas (FT-HSDP, section 4.2).

A ring connects the ranks with the same number in all replicas that take part in a training step; these replicas are the
quorum of the step, and each such rank is a member of the ring. When a replica fails or returns, the next step has
another quorum, and the ring is reconfigured without a restart of the processes.
"""

import math
from collections.abc import Callable

import torch

from ft.base.errors import UserError
from ft.net.streams import Network, TcpNetwork
from ft.systems.hsdp.ring import numbers
from ft.systems.hsdp.ring.driver import Driver, Members, Operation, RingState
from ft.systems.hsdp.ring.options import Pending, RingOptions
from ft.systems.hsdp.ring.staging import when_queued


class Ring:
    """One member of a ring all-reduce whose membership can change between operations.

    A background thread does all work that can take time, in the order of the calls. :meth:`reconfigure` makes the
    connections of a quorum, which are usable until the first failure. A member that notices a failure notifies its
    neighbours and drops its connections, so that all members know of it within milliseconds. Every all-reduce up to the
    next :meth:`reconfigure` then ends at once with the reason.

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
        options = options or RingOptions()
        options.check()
        network = TcpNetwork(network) if isinstance(network, str) else network
        listener, self.address = network.listen()
        self._limit, self._number = options.limit_s, -1
        self._driver = Driver(network, listener, token, options)

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
        self._driver.submit(Members(number, list(members), me), self._limit)

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
        pending = Pending()
        self._driver.submit(Operation(tensor, float(scale), after, pending), self._limit)
        return pending

    def expect(self, limit_s: float) -> None:
        """Set the time limit without progress, in seconds, for all later calls.

        Time spent on waiting for other members counts as time without progress.

        Raises:
            UserError: the limit is not positive.
        """
        if not limit_s > 0:
            raise UserError(f"a limit of {limit_s} s", "give seconds above 0")
        self._limit = limit_s

    def look(self) -> RingState:
        """Return what the ring is doing. Thread-safe; returns at once."""
        return self._driver.look()

    def cancel(self, reason: str) -> None:
        """End all operations submitted so far, running or not, and drop the connections. Thread-safe; returns at once.

        If the ``after`` function of an all-reduce is running, the ring's thread still waits for it to return.
        """
        self._driver.cancel(reason)

    def close(self) -> None:
        """End all operations, close all connections and the listening socket, and wait for the thread to end."""
        self._driver.close()
