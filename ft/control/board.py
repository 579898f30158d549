"""What agents and the control plane exchange messages over: a TCPStore."""

import threading
from collections.abc import Callable
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import Any

import torch.distributed as dist

from ft.errors import UserError
from ft.messages import BadMessage, decode, encode

_INBOX, _ORDER, _FIRST = "control/inbox", "control/order", "control/first"
_KEPT_ORDERS = 1000
_FOREVER = timedelta(days=365)


class Board:
    """One end of the board. Reports go into one queue, orders into a numbered log that every agent follows.

    Args:
        store: the connection that ``post`` and ``publish`` use. open_store: makes a further one, for a blocked reader.
    """

    def __init__(self, store: dist.Store, open_store: Callable[[], dist.Store]):
        self.store, self._open_store = store, open_store
        self._orders = 0
        self._reports: SimpleQueue | None = None

    @classmethod
    def host(cls, host: str, port: int) -> "Board":
        """Starts the store in this process; port 0: any free one.

        Raises:
            UserError: the port is taken.
        """
        try:
            server = dist.TCPStore(host, port, is_master=True, wait_for_workers=False, timeout=_FOREVER)
        except RuntimeError as error:
            raise UserError(
                f"port {port} on {host} cannot be listened on: {str(error).splitlines()[0]}",
                "give --rdzv-endpoint another port",
            ) from error
        return cls(server, lambda: _connect("127.0.0.1", server.port, _FOREVER))

    @classmethod
    def connect(cls, host: str, port: int, timeout_s: float = 60.0) -> "Board":
        """Connects to the store, waiting ``timeout_s`` for it to be there.

        Raises:
            RuntimeError: nothing answers.
        """
        store = _connect(host, port, timedelta(seconds=timeout_s))
        return cls(store, lambda: _connect(host, port, timedelta(seconds=timeout_s)))

    @property
    def port(self) -> int:
        return self.store.port

    def post(self, report: Any) -> None:
        """Agents: hands a report to the control plane."""
        self.store.queue_push(_INBOX, encode(report))

    def follow(self, callback: Callable[[Any], None], start: int = 0) -> None:
        """Agents: calls ``callback(order)`` for every order from number ``start`` on, while the store lives."""
        store = self._open_store()
        store.set_timeout(_FOREVER)
        number = start
        while True:
            callback(decode(store.get(f"{_ORDER}/{number}")))
            number += 1

    def publish(self, order: Any) -> None:
        """Control plane: the next order. Orders that every agent has long had are removed."""
        self.store.set(f"{_ORDER}/{self._orders}", encode(order))
        if self._orders >= _KEPT_ORDERS:
            self.store.delete_key(f"{_ORDER}/{self._orders - _KEPT_ORDERS}")
        self._orders += 1

    def receive(self, timeout_s: float) -> Any | None:
        """Control plane: the next report, or None after ``timeout_s``. What is no message is skipped."""
        if self._reports is None:
            self._reports = SimpleQueue()
            threading.Thread(target=self._read, name="ft-inbox", daemon=True).start()
        try:
            return self._reports.get(timeout=max(0.0, timeout_s))
        except Empty:
            return None

    def _read(self) -> None:
        # A reader that gives up waiting could take a report with it: this one never does.
        store = self._open_store()
        store.set_timeout(_FOREVER)
        while True:
            try:
                self._reports.put(decode(store.queue_pop(_INBOX)))
            except BadMessage:
                continue


def _connect(host: str, port: int, timeout: timedelta) -> dist.Store:
    return dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
