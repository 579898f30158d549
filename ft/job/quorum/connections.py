"""Connections of the quorum server, including those of peers that have not authenticated yet.

The code calls a connection a guest, and an unauthenticated one a stranger.
"""

import selectors
import socket
import sys
import time
from dataclasses import dataclass

from ft.base.errors import FtError
from ft.job.quorum.dispatch import Peer
from ft.job.quorum.wire import Channel

_STRANGER_S = 5.0
"""Limit for a peer to authenticate, in seconds."""
_MOST_STRANGERS = 256
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


class Guests:
    """All connections of the server, registered with one selector."""

    def __init__(self, selector: selectors.BaseSelector, token: str):
        self._selector, self._token = selector, token
        self._here: dict[Connection, bool] = {}  # value: whether the selector watches for writability
        self._lines, self._lines_at = 0, 0.0

    def accept(self, listener: socket.socket) -> None:
        """Accept all pending connections; without a free file descriptor they stay in the listen queue."""
        while True:
            try:
                own, (address, port) = listener.accept()
            except OSError:
                return
            try:
                channel = Channel(own, self._token, is_host=True)
            except (FtError, OSError):  # the peer has closed it already; more may be pending
                own.close()
                continue
            guest = Connection(channel=channel, address=f"{address}:{port}", since=time.monotonic())
            self._here[guest] = False
            self._selector.register(guest.channel, selectors.EVENT_READ, guest)

    def attend(self, guest: Connection) -> None:
        """Watch whether the connection is writable while bytes wait to be sent."""
        wants = guest.channel.wants_write
        if guest in self._here and wants != self._here[guest]:
            self._here[guest] = wants
            mask = selectors.EVENT_READ | (selectors.EVENT_WRITE if wants else 0)
            self._selector.modify(guest.channel, mask, guest)

    def drop(self, guest: Connection, reason: str) -> None:
        if guest not in self._here:
            return
        del self._here[guest]
        self._selector.unregister(guest.channel)
        guest.channel.close()
        who = f"replica {guest.replica} at {guest.address}" if guest.replica is not None else guest.address
        self._say(f"{who}: {reason}")

    def send_strangers_away(self, now: float) -> None:
        """Disconnect peers that have not authenticated in time and, if there are too many, the oldest unauthenticated
        peers.
        """
        strangers = [guest for guest in self._here if not guest.channel.is_known]
        for place, guest in enumerate(strangers):  # oldest first
            if now - guest.since > _STRANGER_S or len(strangers) - place > _MOST_STRANGERS:
                self.drop(guest, "no member of the run")

    def close(self) -> None:
        for guest in list(self._here):
            self.drop(guest, "the server ends")

    def _say(self, line: str) -> None:
        """Log a line, at a limited rate, so that unauthenticated peers cannot fill a disk."""
        now = time.monotonic()
        if now - self._lines_at > 1.0:
            self._lines, self._lines_at = 0, now
        self._lines += 1
        if self._lines <= _MOST_LINES:
            print(f"quorum server: {line}", file=sys.stderr, flush=True)
