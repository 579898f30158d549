"""Connections of the quorum server, including those of peers that have not authenticated yet."""

import selectors
import socket
import sys
import time
from dataclasses import dataclass

from ft.base.errors import FtError
from ft.job.quorum.dispatch import Peer
from ft.job.quorum.wire import Channel

_AUTHENTICATION_S = 5.0
"""Limit for a peer to authenticate, in seconds."""
_MOST_UNAUTHENTICATED = 128
"""Maximum number of unauthenticated connections."""
_MOST_LINES = 20
"""Maximum number of log lines per second."""


@dataclass(eq=False, kw_only=True)
class Connection(Peer):
    """One connection to the server, from a leader, an agent, or a peer that is not authenticated yet.

    Attributes:
        channel: the channel over the socket.
        address: address of the peer, "HOST:PORT".
        since: time at which the peer connected.
    """

    channel: Channel
    address: str
    since: float


class Connections:
    """All connections of the server, registered with one selector."""

    def __init__(self, selector: selectors.BaseSelector, token: str):
        self._selector, self._token = selector, token
        self._here: dict[Connection, bool] = {}  # value: whether the selector watches for writability
        self._lines, self._lines_at = 0, 0.0

    def accept(self, listener: socket.socket) -> None:
        """Accept pending connections, as many as may be unauthenticated, and drop the oldest unauthenticated ones if
        there are more. Without a free file descriptor they stay in the listen queue.
        """
        for _ in range(_MOST_UNAUTHENTICATED):
            try:
                own, (address, port) = listener.accept()
            except OSError:
                break
            try:
                channel = Channel(own, self._token, is_host=True)
            except (FtError, OSError):  # the peer has closed it already; more may be pending
                own.close()
                continue
            connection = Connection(channel=channel, address=f"{address}:{port}", since=time.monotonic())
            self._here[connection] = False
            self._selector.register(connection.channel, selectors.EVENT_READ, connection)
        self.drop_unauthenticated(time.monotonic())

    def attend(self, connection: Connection) -> None:
        """Watch whether ``connection`` is writable while bytes wait to be sent."""
        wants = connection.channel.wants_write
        if connection in self._here and wants != self._here[connection]:
            self._here[connection] = wants
            mask = selectors.EVENT_READ | (selectors.EVENT_WRITE if wants else 0)
            self._selector.modify(connection.channel, mask, connection)

    def drop(self, connection: Connection, reason: str) -> None:
        """Close ``connection``, unless it is closed already, and log the reason."""
        if connection not in self._here:
            return
        del self._here[connection]
        self._selector.unregister(connection.channel)
        connection.channel.close()
        who = connection.address
        if connection.replica is not None:
            who = f"replica {connection.replica} at {who}"
        self._say(f"{who}: {reason}")

    def drop_unauthenticated(self, now: float) -> None:
        """Disconnect peers that have not authenticated in time and, if there are too many, the oldest unauthenticated
        peers.
        """
        unknown = [connection for connection in self._here if not connection.channel.is_known]
        for place, connection in enumerate(unknown):  # oldest first
            if now - connection.since > _AUTHENTICATION_S or len(unknown) - place > _MOST_UNAUTHENTICATED:
                self.drop(connection, "no member of the run")

    def close(self) -> None:
        """Close all connections."""
        for connection in list(self._here):
            self.drop(connection, "the server ends")

    def _say(self, line: str) -> None:
        """Log a line, at a limited rate, so that unauthenticated peers cannot fill a disk."""
        now = time.monotonic()
        if now - self._lines_at > 1.0:
            self._lines, self._lines_at = 0, now
        self._lines += 1
        if self._lines <= _MOST_LINES:
            print(f"quorum server: {line}", file=sys.stderr, flush=True)
