"""A worker's connection to its agent."""

import contextlib
import json
import socket
import threading
from collections.abc import Callable, Mapping
from typing import Any

from ft.base.errors import UserError
from ft.job.messages import decode, encode


def socket_address(name: str) -> str:
    """The address of the agent's socket from FT_AGENT: ``@name`` is in Linux's abstract namespace, which has no files
    to leave behind."""
    return "\0" + name[1:] if name.startswith("@") else name


class Link:
    """The worker's end: reports go up, orders come down. There is no reconnecting: an agent that is gone ends the
    worker."""

    def __init__(self, sock: socket.socket):
        self._sock = sock
        self._lock = threading.Lock()
        self._closed = False
        self.disturb: Callable[[Any], list[Any]] | None = None
        """For fault injection: the reports that are sent in place of one."""

    @classmethod
    def connect(cls, environment: Mapping[str, str]) -> "Link":
        """Connects to the agent that started this process (FT_AGENT) in the name of FT_WORKER.

        Raises:
            UserError: there is no agent: the process was not started by ``ft run``, or the agent has ended.
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
        link._write(json.dumps({"worker": environment["FT_WORKER"]}))
        return link

    @property
    def sock(self) -> socket.socket:
        """The connection itself, for who has to tell it from other sockets of this process."""
        return self._sock

    def send(self, report: Any) -> None:
        """Sends a report of ``ft.job.messages``; safe from any thread.

        Raises:
            OSError: the agent is gone.
        """
        for sent in [report] if self.disturb is None else self.disturb(report):
            self._write(encode(sent))

    def listen(self, callback: Callable[[Any], None]) -> None:
        """Starts a thread that calls ``callback(order)`` for each order, and ``callback(None)`` when the agent is
        gone. After ``close`` nothing is called any more."""
        threading.Thread(target=self._listen, args=(callback,), name="ft-link", daemon=True).start()

    def close(self) -> None:
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
