"""The control channel: reliable messages between agents and the control plane, in a store that the control plane hosts.

Agents send numbered reports; the control plane publishes numbered orders. A control plane that dies is replaced, and no
message may be lost or processed twice. So every agent numbers its reports and keeps them until the control plane has
recorded them in its journal. After each reconnection the agent asks for the number of its last recorded report
(``taken``) and resends the later ones. The control plane records a report before it publishes the decisions on it, and
a new control plane begins with ``resume``, which restores the same orders under the same numbers.

The store is a TCPStore of torch's, which members of the run reach over authenticated connections (``ft.net.store``):
reports are in one queue, orders under numbered keys. A blocked reader wakes within a fraction of a millisecond and does
not delay other readers; nothing polls.
"""

import contextlib
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from queue import Empty, SimpleQueue

from ft.base import bounded_json
from ft.job.messages import Message, decode, encode
from ft.net.codec import BadMessage, is_count
from ft.net.store import StoreConnection, StoreServer, lone_tcp_store

KEPT_ORDERS = 1000
"""Number of orders that the channel keeps: enough for the slowest agent, and bounded for runs of months."""
_INBOX, _ORDER, _FIRST, _TAKEN = "control/inbox", "control/order", "control/first", "control/taken"
_SCHEME = "tcp://"
_VERY_LONG_S = 20 * 24 * 3600.0


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
    report: Message


@dataclass(frozen=True)
class ChannelRecord:
    """The content of the control plane's journal about the messages on the channel.

    Attributes:
        first: number of the first order in ``orders``.
        orders: the last orders that were published, in order.
        taken: agent -> number of its last recorded report.
    """

    first: int = 0
    orders: Sequence[Message] = ()
    taken: Mapping[str, int] | None = None


class AgentChannel:
    """The agent's end of the control channel.

    All methods raise ``ConnectionError`` when the control plane is gone.

    Args:
        where: address of the control plane (``ControlChannel.where``).

    Raises:
        ConnectionError: there is no answer within ``timeout_s``.
        UserError: the token is refused.
    """

    def __init__(self, where: str, node: str, token: str, timeout_s: float):
        address = where.removeprefix(_SCHEME)
        self._node = node
        self._writer, self._reader = (StoreConnection(address, token, timeout_s) for _ in range(2))
        self._reader.set_timeout(timedelta(seconds=_VERY_LONG_S))

    def post(self, number: int, report: Message) -> None:
        """Send a report. Reports arrive in the order of the calls."""
        self._writer.queue_push(_INBOX, json.dumps([self._node, number, encode(report)]))

    def taken(self) -> int:
        """Return the number of this agent's last report that the control plane has recorded, or 0."""
        self._writer.wait([_FIRST])
        key = f"{_TAKEN}/{self._node}"
        return int(self._writer.get(key)) if self._writer.check([key]) else 0

    def follow(self, callback: Callable[[int, Message], None], start: int) -> None:
        """Call ``callback(number, order)`` for every order from number ``start`` on, in sequence; never return.

        If ``start`` is older than the oldest kept order, begin with the oldest. Blocks without polling, and may run on
        another thread than the other methods.
        """
        number = max(start, int(self._reader.get(_FIRST)))
        while True:
            callback(number, decode(self._reader.get(f"{_ORDER}/{number}").decode()))
            number += 1

    def close(self) -> None:
        """End all blocked calls of this object. May be called from any thread."""
        self._writer.break_off()
        self._reader.break_off()


class ControlChannel:
    """The control plane's end of the control channel.

    Args:
        where: ``tcp://HOST:PORT`` to listen on (port 0: any free port).

    Attributes:
        where: the address that agents on any node pass to ``AgentChannel``.

    Raises:
        UserError: the address cannot be listened at.
    """

    def __init__(self, where: str, token: str):
        host, _, port = where.removeprefix(_SCHEME).rpartition(":")
        self._server = StoreServer(host, int(port), token, lone_tcp_store())
        own = f"127.0.0.1:{self._server.address.rpartition(':')[2]}"
        self._store, self._reader = (StoreConnection(own, token, _VERY_LONG_S) for _ in range(2))
        self.where = f"{_SCHEME}{self._server.address}"
        self._orders = self._first = 0
        self._reports: SimpleQueue[Posted] = SimpleQueue()
        self._inbox = threading.Thread(target=self._read, name="ft-inbox", daemon=True)

    def resume(self, record: ChannelRecord) -> None:
        """Restore the channel to the recorded state. This is the first call; calls of agents return only after it."""
        for node, number in (record.taken or {}).items():
            self.took(node, number)
        self._first = self._orders = record.first
        for order in record.orders:
            self.publish(order)
        self._store.set(_FIRST, str(self._first))

    def publish(self, order: Message) -> None:
        """Append an order. The oldest order is dropped once there are more than ``KEPT_ORDERS``."""
        self._store.set(f"{_ORDER}/{self._orders}", encode(order))
        self._orders += 1
        if self._orders - self._first > KEPT_ORDERS:
            self._store.delete_key(f"{_ORDER}/{self._first}")
            self._first += 1
            self._store.set(_FIRST, str(self._first))

    def receive(self, timeout_s: float) -> Posted | None:
        """Return the next report, or None after ``timeout_s`` seconds. Invalid messages are skipped.

        A report may arrive twice, but never out of its agent's order.
        """
        if self._inbox.ident is None:  # not yet started; a thread that has ended cannot be started again
            self._inbox.start()
        try:
            return self._reports.get(timeout=max(0.0, timeout_s))
        except Empty:
            return None

    def took(self, node: str, number: int) -> None:
        """Announce that the reports of agent ``node`` up to ``number`` are recorded."""
        self._store.set(f"{_TAKEN}/{node}", str(number))

    def close(self) -> None:
        """Release the resources of this end."""
        self._store.close()
        self._reader.close()
        self._server.close()
        if self._inbox.is_alive():
            self._inbox.join()

    def _read(self) -> None:
        with contextlib.suppress(ConnectionError):
            while True:
                if (posted := _posted(self._reader.queue_pop(_INBOX))) is not None:
                    self._reports.put(posted)


def _posted(data: bytes) -> Posted | None:
    """Return the report in an element of the inbox; None if it is none, which whoever has the token can put there."""
    try:
        node, number, report = bounded_json.loads(data)
        return Posted(node, number, decode(report)) if isinstance(node, str) and is_count(number) else None
    except (BadMessage, ValueError, TypeError):
        return None
