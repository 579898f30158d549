"""The control channel on the store that the control plane hosts: reports in one queue, orders under numbered keys.

The entries are in a TCPStore of torch's, which members of the run reach over authenticated connections
(``ft.net.store``).

A blocked reader wakes within a fraction of a millisecond and does not delay other readers; nothing polls.
"""

import contextlib
import json
import threading
from collections.abc import Callable
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import Any

from ft.base import bounded_json
from ft.job.control.channel import KEPT_ORDERS, AgentChannel, ControlChannel, Posted, Record
from ft.job.messages import BadMessage, decode, encode
from ft.net.codec import is_count
from ft.net.store import StoreConnection, StoreServer, lone_tcp_store

_INBOX, _ORDER, _FIRST, _TAKEN = "control/inbox", "control/order", "control/first", "control/taken"
_SCHEME = "tcp://"
_VERY_LONG_S = 20 * 24 * 3600.0


class TcpAgentChannel(AgentChannel):
    """The agent's end of the channel; created by ``connect``."""

    def __init__(self, node: str, writer: StoreConnection, reader: StoreConnection):
        self._node, self._writer, self._reader = node, writer, reader

    @classmethod
    def connect(cls, where: str, node: str, token: str, timeout_s: float) -> "TcpAgentChannel":
        """Connect to the store; see ``ft.job.control.channel.connect``."""
        address = where.removeprefix(_SCHEME)
        writer, reader = (StoreConnection(address, token, timeout_s) for _ in range(2))
        reader.set_timeout(timedelta(seconds=_VERY_LONG_S))
        return cls(node, writer, reader)

    def post(self, number: int, report: Any) -> None:
        self._writer.queue_push(_INBOX, json.dumps([self._node, number, encode(report)]))

    def taken(self) -> int:
        self._writer.wait([_FIRST])
        key = f"{_TAKEN}/{self._node}"
        return int(self._writer.get(key)) if self._writer.check([key]) else 0

    def follow(self, callback: Callable[[int, Any], None], start: int) -> None:
        number = max(start, int(self._reader.get(_FIRST)))
        while True:
            callback(number, decode(self._reader.get(f"{_ORDER}/{number}").decode()))
            number += 1

    def close(self) -> None:
        self._writer.break_off()
        self._reader.break_off()


class TcpControlChannel(ControlChannel):
    """The control plane's end of the channel; created by ``host``."""

    def __init__(self, server: StoreServer, token: str):
        own = f"127.0.0.1:{server.address.rpartition(':')[2]}"
        self._server = server
        self._store, self._reader = (StoreConnection(own, token, _VERY_LONG_S) for _ in range(2))
        self.where = f"{_SCHEME}{server.address}"
        self._orders = self._first = 0
        self._reports: SimpleQueue | None = None
        self._inbox = threading.Thread(target=self._read, name="ft-inbox", daemon=True)

    @classmethod
    def host(cls, where: str, token: str) -> "TcpControlChannel":
        """Start the store; see ``ft.job.control.channel.host``."""
        host, _, port = where.removeprefix(_SCHEME).rpartition(":")
        return cls(StoreServer(host, int(port), token, lone_tcp_store()), token)

    def resume(self, record: Record) -> None:
        for node, number in (record.taken or {}).items():
            self.took(node, number)
        self._first = self._orders = record.first
        for order in record.orders:
            self.publish(order)
        self._store.set(_FIRST, str(self._first))

    def publish(self, order: Any) -> None:
        self._store.set(f"{_ORDER}/{self._orders}", encode(order))
        self._orders += 1
        if self._orders - self._first > KEPT_ORDERS:
            self._store.delete_key(f"{_ORDER}/{self._first}")
            self._first += 1
            self._store.set(_FIRST, str(self._first))

    def receive(self, timeout_s: float) -> Posted | None:
        if self._reports is None:
            self._reports = SimpleQueue()
            self._inbox.start()
        try:
            return self._reports.get(timeout=max(0.0, timeout_s))
        except Empty:
            return None

    def took(self, node: str, number: int) -> None:
        self._store.set(f"{_TAKEN}/{node}", str(number))

    def close(self) -> None:
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
