"""What agents and the control plane exchange messages over: numbered reports go up, numbered orders come down.

A control plane that was killed is started again, by whoever, and nothing may be lost or done twice. So every agent
numbers its reports and keeps them until they are on the control plane's record; after each new connection it asks
``taken`` and posts the rest again. The control plane puts a report on record before it publishes what it decided, and
a new one begins with ``resume``: the same orders under the same numbers.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

KEPT_ORDERS = 1000
"""Orders on the board: enough for the slowest agent, few enough for a run of months."""


@dataclass(frozen=True)
class Posted:
    """A report of ``node``'s agent, its ``number``-th from 1 on; 0: a heartbeat, which is not kept, and may be lost."""

    node: str
    number: int
    report: Any


@dataclass(frozen=True)
class Record:
    """What the control plane's journal says of the board.

    Attributes:
        first: number of the first order in ``orders``. orders: the last ones published, in order.
        taken: agent -> number of its last report on record.
    """

    first: int = 0
    orders: Sequence[Any] = ()
    taken: Mapping[str, int] | None = None


class AgentChannel(ABC):
    """An agent's end. All methods raise ``ConnectionError`` when the control plane, or the board, is gone."""

    @abstractmethod
    def post(self, number: int, report: Any) -> None:
        """Hands a report over, in the order of the calls."""

    @abstractmethod
    def taken(self) -> int:
        """The number of this agent's last report on the control plane's record, 0 before there is one."""

    @abstractmethod
    def follow(self, callback: Callable[[int, Any], None], start: int) -> None:
        """Calls ``callback(number, order)`` for every order from ``start`` on, in sequence; never returns.

        A start that is older than the oldest order kept begins with that one. Blocks, and wakes at once: no polling.
        May be called in another thread than the other methods.
        """

    @abstractmethod
    def close(self) -> None:
        """Ends what is blocked in this end; from any thread."""


class ControlChannel(ABC):
    """The control plane's end.

    Attributes:
        where: what ``connect`` takes, for agents on any node.
        absences: how often the board could not be reached from here for so long that what was not heard meanwhile says
            nothing about the agents, and came back. ``receive`` does not return None during one.
    """

    where: str
    absences: int = 0

    @abstractmethod
    def resume(self, record: Record) -> None:
        """The first call: puts the board into the state on record. Only then do agents' calls return."""

    @abstractmethod
    def publish(self, order: Any) -> None:
        """The next order of the log; the oldest goes once there are more than ``KEPT_ORDERS``."""

    @abstractmethod
    def receive(self, timeout_s: float) -> Posted | None:
        """The next report, or None after ``timeout_s``. What is no report is skipped.

        A report may come twice, never out of an agent's order.
        """

    @abstractmethod
    def took(self, node: str, number: int) -> None:
        """The agent's reports up to ``number`` are on record."""

    @abstractmethod
    def close(self) -> None:
        """Gives up what only this end needs."""


def connect(where: str, node: str, token: str, timeout_s: float) -> AgentChannel:
    """The end of ``node``'s agent.

    Args:
        where: ``ControlChannel.where``. token: of the run.

    Raises:
        ConnectionError: nothing answers within ``timeout_s``.
        UserError: the token is refused.
    """
    if where.startswith("etcd://"):
        from ft.job.control.channel.etcd import EtcdAgentChannel

        return EtcdAgentChannel.connect(where, node, token, timeout_s)
    from ft.job.control.channel.tcp import TcpAgentChannel

    return TcpAgentChannel.connect(where, node, token, timeout_s)


def host(where: str, run: str, token: str) -> ControlChannel:
    """The control plane's end.

    Args:
        where: ``tcp://HOST:PORT`` to listen at (port 0: any free one), or ``etcd://[USER:PASSWORD@]HOST:PORT[,...]``.
        run: tells this life of this run from all others that use the same servers.

    Raises:
        UserError: it cannot be had.
    """
    if where.startswith("etcd://"):
        from ft.job.control.channel.etcd import EtcdControlChannel

        return EtcdControlChannel.host(where, run, token)
    from ft.job.control.channel.tcp import TcpControlChannel

    return TcpControlChannel.host(where, token)
