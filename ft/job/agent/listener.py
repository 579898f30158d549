"""The Unix socket on which a node agent of ``ft run`` accepts the connections of its workers (training processes)."""

import os
import secrets
import socket

from ft.job.agent.link import socket_address
from ft.job.agent.workforce import Workforce
from ft.net.channel import Channel
from ft.platform.supervisor import Supervisor


def listen() -> tuple[str, socket.socket]:
    """Open the agent's listening socket. Return (its name for the workers' variable FT_AGENT, the socket).

    The socket is in Linux's abstract namespace, so it leaves no file behind however the agent ends.
    """
    name = f"@ft-agent-{os.getpid()}-{secrets.token_hex(8)}"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(socket_address(name))
    listener.listen(256)
    listener.setblocking(False)
    return name, listener


class WorkerListener:
    """Accepts connections, and passes the connections of workers to the workforce.

    A connection is closed if it belongs to another user or if its first line does not name a worker of this agent.

    Args:
        listener: the socket that ``listen`` returned.
        supervisor: the agent's event loop.
        workforce: the workers of this agent.
    """

    def __init__(self, listener: socket.socket, supervisor: Supervisor, workforce: Workforce):
        self._listener, self._supervisor, self._workforce = listener, supervisor, workforce

    def open(self) -> None:
        """Accept connections from now on."""
        self._supervisor.watch(self._listener, self._on_connection)

    def close(self) -> None:
        """Close the listening socket; accepted connections stay open."""
        self._listener.close()

    def _on_connection(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:  # nobody, or no free file descriptor: the connection waits until there is one
            return
        if not _is_mine(sock):
            sock.close()
            return
        channel = Channel(sock)
        self._supervisor.watch(channel, lambda: self._on_hello(channel))

    def _on_hello(self, channel: Channel) -> None:
        line = channel.receive_line()
        if line is None and not channel.gone:
            return
        self._supervisor.unwatch(channel)
        worker = self._workforce.accept(channel, line) if line is not None else None
        if worker is None:
            channel.close()
            return
        self._supervisor.watch(channel, lambda: self._workforce.hear(worker))
        # the channel has already read any data that followed the first line, so the selector would not report that data
        self._workforce.hear(worker)


def _is_mine(sock: socket.socket) -> bool:
    """Return whether the peer process belongs to this user. Any process on the machine could connect to the socket."""
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return int.from_bytes(credentials[4:8], "little") == os.getuid()
