"""Where workers connect to their agent."""

import contextlib
import os
import secrets
import selectors
import socket

from ft.job.agent.link import socket_address
from ft.job.agent.workforce import Workforce
from ft.net.channel import Channel


def listen() -> tuple[str, socket.socket]:
    """(FT_AGENT, socket): in the abstract namespace, so that no end of the agent leaves a file behind."""
    name = f"@ft-agent-{os.getpid()}-{secrets.token_hex(8)}"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(socket_address(name))
    listener.listen(256)
    listener.setblocking(False)
    return name, listener


def unwatch(selector: selectors.BaseSelector, channel: Channel | None) -> None:
    """Takes a channel out of the selector, if it is in there."""
    with contextlib.suppress(KeyError, ValueError):
        selector.unregister(channel)


class WorkerListener:
    """Takes connections and hands those that belong to a worker to the workforce.

    Args:
        listener: what ``listen`` made. selector: of the loop; its keys' data are functions to call when readable.
    """

    def __init__(self, listener: socket.socket, selector: selectors.BaseSelector, workforce: Workforce):
        self._listener, self._selector, self._workforce = listener, selector, workforce

    def open(self) -> None:
        self._selector.register(self._listener, selectors.EVENT_READ, self._on_connection)

    def close(self) -> None:
        self._listener.close()

    def _on_connection(self) -> None:
        with contextlib.suppress(BlockingIOError):
            sock, _ = self._listener.accept()
            if not _is_mine(sock):
                sock.close()
                return
            channel = Channel(sock)
            self._selector.register(channel, selectors.EVENT_READ, lambda: self._on_hello(channel))

    def _on_hello(self, channel: Channel) -> None:
        line = channel.receive_line()
        if line is None and not channel.gone:
            return
        unwatch(self._selector, channel)
        worker = self._workforce.accept(channel, line) if line is not None else None
        if worker is None:
            channel.close()
            return
        self._selector.register(channel, selectors.EVENT_READ, lambda: self._workforce.hear(worker))
        self._workforce.hear(worker)  # what came together with the first line makes nothing readable any more


def _is_mine(sock: socket.socket) -> bool:
    """Whether the process at the other end belongs to this user: anyone on the machine can find the socket."""
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return int.from_bytes(credentials[4:8], "little") == os.getuid()
