"""The agent's connection to the control plane, on threads of its own: the agent's loop never waits for the network."""

import os
import queue
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ft.agent import network
from ft.messages import AgentJoined

_CONNECT_S = 120.0
_RECORD_S = 2.0


@dataclass(frozen=True)
class Lost:
    """There is no control plane any more, or it was never reached."""

    reason: str


@dataclass(frozen=True)
class Master:
    """Where a script's own process group meets after warm restart ``number``."""

    number: int
    host: str
    port: int


@dataclass(frozen=True)
class _Question:
    """What other agents say of the ``Master`` of restart ``number``."""

    number: int


class Uplink:
    """Posts reports and collects what comes down.

    Args:
        host, port: of the control plane. wake: called from threads whenever ``take`` has something.
    """

    def __init__(self, host: str, port: int, wake: Callable[[], None]):
        self._host, self._port, self._wake = host, port, wake
        self._reports: queue.SimpleQueue = queue.SimpleQueue()
        self._came: deque[Any] = deque()
        self._connection = 0

    def start(self, joined: AgentJoined) -> None:
        """Connects, says ``joined`` first, and goes on; returns at once. Called again, it starts anew: what came from
        the control plane before, and what was not sent yet, is dropped."""
        self._connection += 1
        self._reports, self._came = queue.SimpleQueue(), deque()
        self._spawn(self._send, joined, self._reports)

    def post(self, report: Any) -> None:
        """Hands a report over; it goes out in the order of the calls."""
        self._reports.put(report)

    def record(self, report: Any, patience_s: float = _RECORD_S) -> None:
        """Posts a report and returns once it is out, or after ``patience_s``."""
        self._reports.put(report)
        self.flush(patience_s)

    def flush(self, patience_s: float) -> None:
        """Waits until everything has been posted, ``patience_s`` at most."""
        out = threading.Event()
        self._reports.put(out)
        out.wait(patience_s)

    def take(self) -> list[Any]:
        """Orders, ``Master`` and ``Lost`` that have come since the last time."""
        found = []
        while self._came:
            found.append(self._came.popleft())
        return found

    def share_master(self, number: int, host: str, port: int) -> None:
        """Tells the other agents where the processes of restart ``number`` meet."""
        self._reports.put(Master(number, host, port))

    def ask_master(self, number: int) -> None:
        """``take`` will have the ``Master`` of restart ``number`` once its agent has told."""
        self._reports.put(_Question(number))

    def close(self) -> None:
        """What comes from now on, losses included, is of no interest."""
        self._connection += 1

    # --- threads -----------------------------------------------------------------------------------------------------

    def _spawn(self, work: Callable[..., None], *arguments: Any) -> None:
        connection = self._connection

        def deliver(what: Any) -> None:
            if connection == self._connection:
                self._came.append(what)
                self._wake()

        def run() -> None:
            try:
                work(*arguments, deliver)
            except ConnectionError as error:
                deliver(Lost(str(error)))
            except Exception as error:  # torch's own text is a C++ stack
                deliver(Lost(f"the connection to the control plane broke ({type(error).__name__})"))

        threading.Thread(target=run, name="ft-uplink", daemon=True).start()

    def _send(self, joined: AgentJoined, reports: queue.SimpleQueue, deliver: Callable[[Any], None]) -> None:
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # the end of the control plane is no news at the terminal
        from ft.control.board import Board  # brings torch, which the agent's loop does not wait for

        network.wait_for_listener(self._host, self._port, _CONNECT_S)
        board = Board.connect(self._host, self._port, timeout_s=_CONNECT_S)
        board.post(joined)
        self._spawn(self._follow, board)
        while True:
            report = reports.get()
            if isinstance(report, Master):
                board.store.set(_master_key(report.number), f"{report.host}:{report.port}")
            elif isinstance(report, _Question):
                self._spawn(self._fetch_master, report.number)
            elif isinstance(report, threading.Event):
                report.set()
            else:
                board.post(report)

    def _follow(self, board: Any, deliver: Callable[[Any], None]) -> None:
        board.follow(deliver)
        deliver(Lost("the connection to the control plane has ended"))

    def _fetch_master(self, number: int, deliver: Callable[[Any], None]) -> None:
        from ft.control.board import Board

        store = Board.connect(self._host, self._port, timeout_s=_CONNECT_S).store
        host, _, port = store.get(_master_key(number)).decode().rpartition(":")
        deliver(Master(number, host, int(port)))


def _master_key(number: int) -> str:
    return f"agent/master/{number}"
