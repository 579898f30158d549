"""What agents and the control plane exchange messages over: reports in one queue, orders in a numbered log.

A board of another kind has to offer the same: ``post`` and ``follow`` for agents, ``receive`` and ``publish`` for the
control plane, ``store`` for what process groups need. This one is on a TCPStore. Its blocked
readers wake within a fraction of a millisecond and hold up nobody else; nothing polls.
"""

import threading
from collections.abc import Callable
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import Any

import torch.distributed as dist

from ft.errors import UserError
from ft.messages import BadMessage, decode, encode

_INBOX, _ORDER, _FIRST = "control/inbox", "control/order", "control/first"
KEPT_ORDERS = 1000
"""Orders in the store: enough for the slowest agent, few enough for a run of months."""
_VERY_LONG = timedelta(days=20)
"""The longest wait that TCPStore can count, in milliseconds of 31 bits."""


class Board:
    """One end of the board; made by ``host`` or ``connect``.

    Args:
        store: the connection that ``post`` and ``publish`` use. reader: makes a further one, for a blocked reader.
    """

    def __init__(self, store: dist.Store, reader: Callable[[], dist.Store]):
        self.store, self._reader = store, reader
        self._orders = 0
        self._reports: SimpleQueue | None = None

    @classmethod
    def host(cls, host: str, port: int) -> "Board":
        """Starts the store in this process; port 0: any free one.

        Raises:
            UserError: the port is taken.
        """
        try:
            server = dist.TCPStore(host, port, is_master=True, wait_for_workers=False, timeout=_VERY_LONG)
        except RuntimeError as error:
            raise UserError(
                f"port {port} on {host} cannot be listened on: {str(error).splitlines()[0]}",
                "give --rdzv-endpoint another port",
            ) from error
        server.set(_FIRST, "0")
        return cls(server, lambda: _connect("127.0.0.1", server.port, _VERY_LONG))

    @classmethod
    def connect(cls, host: str, port: int, timeout_s: float = 60.0) -> "Board":
        """Connects to the store, waiting ``timeout_s`` for it to be there.

        Raises:
            RuntimeError: nothing answers.
        """
        timeout = timedelta(seconds=timeout_s)
        return cls(_connect(host, port, timeout), lambda: _connect(host, port, timeout))

    @property
    def port(self) -> int:
        return self.store.port

    def post(self, report: Any) -> None:
        """Agents: hands a report to the control plane.

        Raises:
            RuntimeError: the store is gone.
        """
        self.store.queue_push(_INBOX, encode(report))

    def follow(self, callback: Callable[[Any], None], start: int | None = None) -> None:
        """Agents: calls ``callback(order)`` for every order in sequence; does not return while the store lives.

        Args:
            start: number of the first order; None: the oldest that is kept.

        Raises:
            RuntimeError: the store is gone.
        """
        store = self._reader()
        number = int(store.get(_FIRST)) if start is None else start
        store.set_timeout(_VERY_LONG)
        while True:
            text = _patiently(lambda: store.get(f"{_ORDER}/{number}"))  # noqa: B023 - called at once
            callback(decode(text))
            number += 1

    def publish(self, order: Any) -> None:
        """Control plane: the next order of the log; the oldest goes once there are too many."""
        self.store.set(f"{_ORDER}/{self._orders}", encode(order))
        self._orders += 1
        oldest = self._orders - KEPT_ORDERS
        if oldest > 0:
            self.store.set(_FIRST, str(oldest))
            self.store.delete_key(f"{_ORDER}/{oldest - 1}")

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
        # A reader that gave up waiting might take a report with it: this one never does.
        store = self._reader()
        store.set_timeout(_VERY_LONG)
        while True:
            text = _patiently(lambda: store.queue_pop(_INBOX))
            try:
                self._reports.put(decode(text))
            except BadMessage:
                continue


def _connect(host: str, port: int, timeout: timedelta) -> dist.Store:
    return dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)


def _patiently(read: Callable[[], bytes]) -> bytes:
    """``read()``, again when even the longest wait has ended without anything."""
    while True:
        try:
            return read()
        except dist.DistStoreError as error:
            if "timeout" not in str(error):
                raise
