"""The control channel: reliable messages between agents and the control plane, over a TCP store or etcd.

Agents send numbered reports; the control plane publishes numbered orders. A control plane that dies is replaced, and no
message may be lost or processed twice. So every agent numbers its reports and keeps them until the control plane has
recorded them in its journal. After each reconnection the agent asks for the number of its last recorded report
(``taken``) and resends the later ones. The control plane records a report before it publishes the decisions on it, and
a new control plane begins with ``resume``, which restores the same orders under the same numbers.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

KEPT_ORDERS = 1000
"""Number of orders that the channel keeps: enough for the slowest agent, and bounded for runs of months."""


@dataclass(frozen=True)
class Posted:
    """A report as it arrives at the control plane.

    Attributes:
        node: the agent that sent it.
        number: the agent's number for it, from 1; 0 for a heartbeat, which is not kept and may be lost.
        report: the message.
    """

    node: str
    number: int
    report: Any


@dataclass(frozen=True)
class Record:
    """The content of the control plane's journal about the messages on the channel.

    Attributes:
        first: number of the first order in ``orders``.
        orders: the last orders that were published, in order.
        taken: agent -> number of its last recorded report.
    """

    first: int = 0
    orders: Sequence[Any] = ()
    taken: Mapping[str, int] | None = None


class AgentChannel(ABC):
    """The agent's end of the control channel.

    All methods raise ``ConnectionError`` when the control plane or the channel's server is gone.
    """

    @abstractmethod
    def post(self, number: int, report: Any) -> None:
        """Send a report. Reports arrive in the order of the calls."""

    @abstractmethod
    def taken(self) -> int:
        """Return the number of this agent's last report that the control plane has recorded, or 0."""

    @abstractmethod
    def follow(self, callback: Callable[[int, Any], None], start: int) -> None:
        """Call ``callback(number, order)`` for every order from number ``start`` on, in sequence; never return.

        If ``start`` is older than the oldest kept order, begin with the oldest. Blocks without polling, and may run on
        another thread than the other methods.
        """

    @abstractmethod
    def close(self) -> None:
        """End all blocked calls of this object. May be called from any thread."""


class ControlChannel(ABC):
    """The control plane's end of the control channel.

    Attributes:
        where: the address that agents on any node pass to ``connect``.
        absences: how often the channel's server was unreachable for so long that missing heartbeats say nothing about
            the agents, and came back. During such a time ``receive`` does not return None.
    """

    where: str
    absences: int = 0

    @abstractmethod
    def resume(self, record: Record) -> None:
        """Restore the channel to the recorded state. This is the first call; calls of agents return only after it."""

    @abstractmethod
    def publish(self, order: Any) -> None:
        """Append an order. The oldest order is dropped once there are more than ``KEPT_ORDERS``."""

    @abstractmethod
    def receive(self, timeout_s: float) -> Posted | None:
        """Return the next report, or None after ``timeout_s`` seconds. Invalid messages are skipped.

        A report may arrive twice, but never out of its agent's order.
        """

    @abstractmethod
    def took(self, node: str, number: int) -> None:
        """Announce that the reports of agent ``node`` up to ``number`` are recorded."""

    @abstractmethod
    def close(self) -> None:
        """Release the resources of this end. What other processes need stays."""


def connect(where: str, node: str, token: str, timeout_s: float) -> AgentChannel:
    """Connect the agent of ``node`` to the control plane.

    Args:
        where: address of the channel (``ControlChannel.where``).
        node: name of the agent.
        token: secret of the run.
        timeout_s: limit in seconds.

    Raises:
        ConnectionError: there is no answer within ``timeout_s``.
        UserError: the token is refused.
    """
    if where.startswith("etcd://"):
        from ft.job.control.channel.etcd import EtcdAgentChannel

        return EtcdAgentChannel.connect(where, node, token, timeout_s)
    from ft.job.control.channel.tcp import TcpAgentChannel

    return TcpAgentChannel.connect(where, node, token, timeout_s)


def host(where: str, run: str, token: str) -> ControlChannel:
    """Create the control plane's end of the channel.

    Args:
        where: ``tcp://HOST:PORT`` to listen on (port 0: any free port), or ``etcd://[USER:PASSWORD@]HOST:PORT[,...]``.
        run: unique name of this life of the run (the time between two starts from the checkpoint) on the etcd servers.
        token: secret of the run.

    Raises:
        UserError: the channel cannot be created.
    """
    if where.startswith("etcd://"):
        from ft.job.control.channel.etcd import EtcdControlChannel

        return EtcdControlChannel.host(where, run, token)
    from ft.job.control.channel.tcp import TcpControlChannel

    return TcpControlChannel.host(where, token)
