"""Public interface of the fault-tolerant all-reduce (FTAR) between the same ranks of all replicas (FT-HSDP, section
4.2).
"""

import math
from collections.abc import Callable

import torch

from ft.base.errors import UserError
from ft.net.streams import Network, TcpNetwork
from ft.systems.hsdp.ring import numbers
from ft.systems.hsdp.ring.driver import Driver, Members, Operation
from ft.systems.hsdp.ring.options import RingOptions
from ft.systems.hsdp.ring.outcome import Pending


class Ring:
    """One member of a ring all-reduce whose membership can change between operations.

    A thread of its own does everything that can take time, in the order of the calls. :meth:`reconfigure` makes the
    connections of a quorum, which are usable until the first failure. A member that notices a failure tells its
    neighbours and drops its connections, so all members know within milliseconds. Every operation up to the next
    :meth:`reconfigure` then ends at once with the reason.

    Args:
        network: network that carries the connections; a string means TCP and is the host at which others reach this
            node.
        token: secret shared by the processes of a run; peers that cannot prove to know it are refused.
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
        """Drop the present connections and make those of quorum ``number``; return at once.

        Failures to connect show in the operations that follow. A ring with one member only scales.

        Args:
            number: number of the quorum, above that of every earlier call.
            members: addresses of the members, in the order of the ring.
            me: index of this member.

        Raises:
            UserError: the arguments are no quorum that this member is in.
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
        """Start to replace ``tensor`` by the sum over all members times ``scale``; the result has equal bits on all
        members.

        Args:
            tensor: fp32 or bf16 (with default options summed in fp32 and rounded once), contiguous; must not be touched
                until the operation is over. All members pass the same number of elements, type and scale, in the same
                order of calls.
            scale: factor of the sum.
            after: called before the tensor is read, in the ring's thread; blocks until the tensor may be read. It must
                return by itself. If it raises, the operation has failed for all members; here it fails with that
                exception, unless that is a RecoverableError.

        Raises:
            UserError: the ring cannot reduce this tensor.
        """
        numbers.check(tensor)
        if not math.isfinite(scale):
            raise UserError(f"an all-reduce with the scale {scale}", "give a finite one")
        pending = Pending()
        self._driver.submit(Operation(tensor, float(scale), after, pending), self._limit)
        return pending

    def expect(self, limit_s: float) -> None:
        """Set the time limit without progress, in seconds, for all later calls; waiting for other members counts.

        Raises:
            UserError: the limit is not positive.
        """
        if not limit_s > 0:
            raise UserError(f"a limit of {limit_s} s", "give seconds above 0")
        self._limit = limit_s

    def cancel(self, reason: str) -> None:
        """End all operations submitted so far, running or not, and the present quorum. Thread-safe; returns at once.

        An ``after`` that blocks is still waited for.
        """
        self._driver.cancel(reason)

    def close(self) -> None:
        """Drop everything, and wait for the thread to end."""
        self._driver.close()
