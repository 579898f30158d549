"""The fault-tolerant all-reduce (FTAR) of one rank with the same rank of the other replicas (FT-HSDP, section 4.2)."""

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
    """One member. All that can take time is done by a thread of its own, in the order in which it was asked for.

    A quorum's connections are made by :meth:`reconfigure` and are of use until the first failure: whoever notices one
    tells its neighbours and drops its connections, so that all members know within milliseconds, and every operation
    up to the next :meth:`reconfigure` ends at once with the reason.

    Args:
        network: what carries the connections; a host (the one of this node that others reach it at) stands for TCP.
        token: shared by the processes of a run; whoever cannot prove to know it is turned away.

    Attributes:
        address: what the other members give to :meth:`reconfigure` to reach this one.

    Raises:
        UserError: the options cannot work.
    """

    def __init__(self, network: Network | str, token: str, options: RingOptions | None = None):
        options = options or RingOptions()
        options.check()
        network = TcpNetwork(network) if isinstance(network, str) else network
        listener, self.address = network.listen()
        self._limit, self._number = options.limit_s, -1
        self._driver = Driver(network, listener, token, options)

    def reconfigure(self, number: int, members: list[str], me: int) -> None:
        """Drops the present connections and makes those of quorum ``number``; returns at once.

        Whether that works shows in the operations that follow. A ring of one member only scales.

        Args:
            number: above that of every earlier call. members: addresses, in the order of the ring. me: own index.

        Raises:
            UserError: these cannot be a quorum that this member is in.
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
        """Starts to replace ``tensor`` by the sum of all members' times ``scale``, bit for bit the same everywhere.

        Args:
            tensor: fp32 or bf16 (summed up in fp32, rounded once), contiguous; the caller leaves it alone meanwhile.
                All members give the same number of elements, type and scale, in the same order of calls.
            after: called before the tensor is read, in the ring's thread; waits until it may be. It must end by
                itself. If it raises, the operation has failed: for all members, and here with that exception, unless
                it is a RecoverableError.

        Raises:
            UserError: no ring can reduce this tensor.
        """
        numbers.check(tensor)
        if not math.isfinite(scale):
            raise UserError(f"an all-reduce with the scale {scale}", "give a finite one")
        pending = Pending()
        self._driver.submit(Operation(tensor, float(scale), after, pending), self._limit)
        return pending

    def expect(self, limit_s: float) -> None:
        """What is asked for from now on fails when nothing has moved for ``limit_s``, waiting for others included."""
        if not limit_s > 0:
            raise UserError(f"a limit of {limit_s} s", "give seconds above 0")
        self._limit = limit_s

    def cancel(self, reason: str) -> None:
        """Ends what has been asked for so far, under way or not, and the present quorum; any thread, returns at once.

        An ``after`` that waits is waited for.
        """
        self._driver.cancel(reason)

    def close(self) -> None:
        """Drops everything, and waits for the thread to end."""
        self._driver.close()
