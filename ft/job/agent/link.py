"""The worker's end of its connection to the node agent: a Unix socket with one JSON message per line."""

import contextlib
import json
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from ft.base.errors import UserError
from ft.job.messages import decode, encode
from ft.platform.processes import Handler


def socket_address(name: str) -> str:
    """Return the address of the agent's socket for the value of FT_AGENT.

    A name that begins with @ is in Linux's abstract namespace, which leaves no files behind.
    """
    return "\0" + name[1:] if name.startswith("@") else name


class Link:
    """The worker's end of the connection: sends reports to the agent and receives orders.

    A lost connection is not remade: when the agent has ended, the worker ends too.
    """

    def __init__(self, sock: socket.socket):
        self._sock = sock
        self._lock = threading.Lock()
        self._closed = False
        self.disturb: Callable[[Any], list[Any]] | None = None
        """Hook for fault injection: function from a report to the reports to send in its place."""

    @classmethod
    def connect(cls, environment: Mapping[str, str], stacks: Handler | None = None) -> "Link":
        """Connect to the agent that started this process (FT_AGENT) as worker FT_WORKER.

        Args:
            stacks: handler by which the agent can get the stacks of this process.

        Raises:
            UserError: no agent answers, because ``ft run`` did not start this process or the agent has ended.
        """
        fix = "start the script with: ft run --nproc-per-node N SCRIPT ..."
        if "FT_AGENT" not in environment or "FT_WORKER" not in environment:
            raise UserError("this process was not started by ft run: FT_AGENT or FT_WORKER is not set", fix)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.connect(socket_address(environment["FT_AGENT"]))
        except OSError as error:
            sock.close()
            raise UserError(f"no agent answers at {environment['FT_AGENT']} ({error.strerror})", fix) from error
        link = cls(sock)
        hello = {"worker": environment["FT_WORKER"]}
        link._write(json.dumps(hello if stacks is None else {**hello, "stacks": asdict(stacks)}))
        return link

    @property
    def sock(self) -> socket.socket:
        """Return the socket, for code that must distinguish it from other sockets of this process."""
        return self._sock

    def send(self, report: Any) -> None:
        """Send a report, an object of one of the message classes in ``ft.job.messages``. Safe from any thread.

        Raises:
            OSError: the agent is gone.
        """
        for sent in [report] if self.disturb is None else self.disturb(report):
            self._write(encode(sent))

    def listen(self, callback: Callable[[Any], None]) -> None:
        """Start a thread that calls ``callback(order)`` for each order from the agent.

        When the agent has closed the connection, the thread calls ``callback(None)`` and ends. After ``close`` the
        callback is not called any more.
        """
        threading.Thread(target=self._listen, args=(callback,), name="ft-link", daemon=True).start()

    def close(self) -> None:
        """Close the connection; the callback of ``listen`` is not called any more."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()

    def _listen(self, callback: Callable[[Any], None]) -> None:
        waiting = b""
        while True:
            try:
                data = self._sock.recv(1 << 16)
            except OSError:
                data = b""
            if self._closed:
                return
            if not data:
                callback(None)
                return
            *lines, waiting = (waiting + data).split(b"\n")
            for line in lines:
                callback(decode(line))

    def _write(self, line: str) -> None:
        with self._lock:
            self._sock.sendall(line.encode() + b"\n")
