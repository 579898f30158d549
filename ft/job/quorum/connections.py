"""The connections of the quorum server."""

import selectors
import socket
import sys
import time
from dataclasses import dataclass, field

from ft.base.errors import FtError
from ft.job.quorum.wire import Channel

_STRANGER_S = 5.0
_MOST_STRANGERS = 256
_MOST_LINES = 20


@dataclass(eq=False)
class Connection:
    """Who is connected: a leader with its replica and life, an agent, or somebody who has yet to prove a thing.

    ``rows``: replica -> life whose rows this one has. ``refused``: why it gets no quorum, if so.
    """

    channel: Channel
    address: str
    since: float
    replica: int | None = None
    life: int = -1
    rows: dict[int, int] = field(default_factory=dict)
    refused: str = ""


class Guests:
    """All connections, in one selector. ``leaders``: replica -> its leader's."""

    def __init__(self, selector: selectors.BaseSelector, token: str):
        self.leaders: dict[int, Connection] = {}
        self._selector, self._token = selector, token
        self._here: dict[Connection, bool] = {}  # and whether it waits to be written to
        self._lines, self._lines_at = 0, 0.0

    def accept(self, listener: socket.socket) -> None:
        """Takes in all that knock; without a descriptor to spare they wait outside."""
        while True:
            try:
                own, (address, port) = listener.accept()
            except OSError:
                return
            try:
                channel = Channel(own, self._token, is_host=True)
            except (FtError, OSError):  # it has hung up already; there are others behind it
                own.close()
                continue
            guest = Connection(channel, f"{address}:{port}", time.monotonic())
            self._here[guest] = False
            self._selector.register(guest.channel, selectors.EVENT_READ, guest)

    def attend(self, guest: Connection) -> None:
        """Watches for room to write, if bytes wait."""
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
        """Those who have not shown for long that they belong to the run, and the oldest when there are many."""
        strangers = [guest for guest in self._here if not guest.channel.is_known]
        for place, guest in enumerate(strangers):  # in the order in which they came
            if now - guest.since > _STRANGER_S or len(strangers) - place > _MOST_STRANGERS:
                self.drop(guest, "no member of the run")

    def close(self) -> None:
        for guest in list(self._here):
            self.drop(guest, "the server ends")

    def _say(self, line: str) -> None:
        """Into the log, at a pace at which strangers cannot fill a disk."""
        now = time.monotonic()
        if now - self._lines_at > 1.0:
            self._lines, self._lines_at = 0, now
        self._lines += 1
        if self._lines <= _MOST_LINES:
            print(f"quorum server: {line}", file=sys.stderr, flush=True)
