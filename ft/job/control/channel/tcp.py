"""The control channel on a TCPStore that the control plane hosts: reports in one queue, orders under numbered keys.

A blocked reader wakes within a fraction of a millisecond and does not delay other readers; nothing polls.
"""

import contextlib
import json
import threading
from collections.abc import Callable
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import Any

import torch.distributed as dist

from ft.job.control.channel import KEPT_ORDERS, AgentChannel, ControlChannel, Posted, Record
from ft.job.messages import BadMessage, decode, encode
from ft.net.store import StoreConnection, StoreServer

_INBOX, _ORDER, _FIRST, _TAKEN = "control/inbox", "control/order", "control/first", "control/taken"
_SCHEME = "tcp://"
_END = "end"
"""What the control plane puts into its own inbox to end the thread that reads it."""
_END_S = 1.0
"""Limit for the end of that thread, in seconds."""
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
        reader.store.set_timeout(timedelta(seconds=_VERY_LONG_S))
        return cls(node, writer, reader)

    def post(self, number: int, report: Any) -> None:
        with _lost():
            self._writer.store.queue_push(_INBOX, json.dumps([self._node, number, encode(report)]))

    def taken(self) -> int:
        with _lost():
            store = self._writer.store
            store.wait([_FIRST])
            key = f"{_TAKEN}/{self._node}"
            return int(store.get(key)) if store.check([key]) else 0

    def follow(self, callback: Callable[[int, Any], None], start: int) -> None:
        store = self._reader.store
        with _lost():
            number = max(start, int(store.get(_FIRST)))
        while True:
            with _lost():
                text = _patiently(lambda: store.get(f"{_ORDER}/{number}"))  # noqa: B023 - called at once
            callback(number, decode(text))
            number += 1

    def close(self) -> None:
        self._writer.break_off()
        self._reader.break_off()


class TcpControlChannel(ControlChannel):
    """The control plane's end of the channel; created by ``host``."""

    def __init__(self, server: StoreServer, reader: StoreConnection):
        self._server, self._store, self._reader = server, server.store, reader
        self.where = f"{_SCHEME}{server.address}"
        self._orders = self._first = 0
        self._reports: SimpleQueue | None = None
        self._inbox = threading.Thread(target=self._read, name="ft-inbox", daemon=True)

    @classmethod
    def host(cls, where: str, token: str) -> "TcpControlChannel":
        """Start the store; see ``ft.job.control.channel.host``."""
        host, _, port = where.removeprefix(_SCHEME).rpartition(":")
        server = StoreServer(host, int(port), token)
        own = f"127.0.0.1:{server.address.rpartition(':')[2]}"
        return cls(server, StoreConnection(own, token, _VERY_LONG_S))

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
        if self._inbox.is_alive():  # torch writes a stack trace to stderr if a connection ends during a read
            self._store.queue_push(_INBOX, _END)
            self._inbox.join(_END_S)
        self._server.close()
        self._reader.break_off()

    def _read(self) -> None:
        # A read that times out could remove a report from the queue and lose it. This loop never gives up a read.
        with contextlib.suppress(ConnectionError):
            while True:
                with _lost():
                    text = _patiently(lambda: self._reader.store.queue_pop(_INBOX)).decode()
                if text == _END:
                    return
                with contextlib.suppress(BadMessage, ValueError, TypeError):
                    node, number, report = json.loads(text)
                    self._reports.put(Posted(str(node), int(number), decode(report)))


@contextlib.contextmanager
def _lost():
    """Return a context that converts torch's errors, whose text is a C++ stack trace, into ``ConnectionError``."""
    try:
        yield
    except RuntimeError as error:
        raise ConnectionError(f"the connection to the control plane broke ({type(error).__name__})") from error


def _patiently(read: Callable[[], bytes]) -> bytes:
    """Return ``read()``; repeat it whenever the store's longest timeout has passed."""
    while True:
        try:
            return read()
        except dist.DistStoreError as error:
            if "timeout" not in str(error):
                raise
