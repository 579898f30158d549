"""The connections of one member in one quorum: to its left neighbour, from whom data comes, and to its right one."""

import contextlib
import select
import socket
import time
from dataclasses import dataclass

from ft.systems.hsdp.ring.blame import LEFT, RIGHT, blame
from ft.systems.hsdp.ring.control import BREAK, LEAVE, PING, PONG, Control, Message
from ft.systems.hsdp.ring.outcome import Broken
from ft.systems.hsdp.ring.poller import READ, Poller

_GRACE_S = 0.05
"""How long a broken neighbour's last words may take: they come over another connection than the data."""


@dataclass
class Link:
    """One neighbour.

    Attributes:
        index: among the members. data: the connections that carry it.
        answer: to the last question.
        gone: why nothing new will come from it. What it has sent before may still be on its way.
    """

    side: str
    index: int
    control: Control
    data: list[socket.socket]
    answer: Message | None = None
    gone: Broken | None = None

    def name(self) -> str:
        return f"the {self.side} neighbour, member {self.index},"


class Links:
    """Both neighbours'.

    Attributes:
        left, right: None until they are connected.
        broken: set for good as soon as the ring is known to be of no use even for what is under way.
        operation, busy: as in :class:`ft.systems.hsdp.ring.control.Message`.
        asked: when the neighbours were last asked whether they are there; None: not since something moved.
    """

    def __init__(self, poller: Poller):
        self.left: Link | None = None
        self.right: Link | None = None
        self.broken: Broken | None = None
        self.operation, self.busy = 0, False
        self.asked: float | None = None
        self._poller = poller
        self._closed = False

    def join(self, side: str, index: int, connections: list[socket.socket]) -> None:
        """Takes over the connections to one neighbour, the one for control first."""
        link = Link(side, index, Control(connections[0]), connections[1:])
        setattr(self, side, link)
        self._poller.watch(link.control.fileno(), READ, lambda: self._hear(link))

    def ask(self) -> None:
        """Asks both neighbours whether and where they are."""
        self.asked = time.monotonic()
        for link in self._joined():
            link.answer = None
            link.control.say(Message(PING))

    def blame(self) -> tuple[int | None, str]:
        """Who is the cause when nothing moves, by index, and why; None: both neighbours wait too."""
        if gone := next((link.gone for link in self._joined() if link.gone), None):
            return gone.suspect, gone.reason
        side, why = blame(self.operation, self.left.answer, self.right.answer)
        link = {LEFT: self.left, RIGHT: self.right}.get(side)
        return (link.index, f"{link.name()} {why}") if link else (None, why)

    def nothing_moves(self, limit_s: float) -> Broken:
        """Why, from what they have answered."""
        suspect, why = self.blame()
        return Broken(f"nothing has moved for {limit_s:g} s: {why}", suspect)

    def lost(self, link: Link, how: str) -> Broken:
        """Why the data of ``link`` ended: it may have said so, or be the cause itself."""
        deadline = time.monotonic() + _GRACE_S
        words = select.poll()
        words.register(link.control, select.POLLIN)
        while self.broken is None and link.gone is None and (left := deadline - time.monotonic()) > 0:
            if words.poll(left * 1e3):
                self._hear(link)
        return self.broken or link.gone or Broken(f"{link.name()} is lost: {how}", link.index)

    def useless(self) -> Broken | None:
        """Why nothing new can be done with them; None: it can."""
        return self.broken or next((link.gone for link in self._joined() if link.gone), None)

    def close(self, why: Broken) -> None:
        """Drops all connections; ``why`` is told to the neighbours first.

        In the middle of an operation that travels round the ring and ends it everywhere. Otherwise the neighbours
        finish what they can with what has been sent: this member counts it as done, and so should they.
        """
        if self._closed:
            return
        self._closed = True
        kind = BREAK if self.busy or self.broken else LEAVE
        for link in self._joined():
            self._poller.forget(link.control.fileno())
            link.control.say(Message(kind, self.operation, suspect=why.suspect, reason=why.reason))
        for link in self._joined():
            for connection in link.data:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
                connection.close()
            link.control.close()

    def _hear(self, link: Link) -> None:
        try:
            for message in link.control.hear():
                self._take(link, message)
        except ConnectionError as error:
            self._poller.forget(link.control.fileno())
            link.gone = link.gone or Broken(f"{link.name()} is lost: {error}", link.index)

    def _take(self, link: Link, message: Message) -> None:
        if message.kind == PING:
            link.control.say(Message(PONG, self.operation, self.busy))
        elif message.kind == PONG:
            link.answer = message
        elif message.kind == LEAVE:
            link.gone = Broken(message.reason, message.suspect)
            if self.busy and message.operation < self.operation and self.broken is None:
                self.broken = link.gone  # it never comes to the operation under way
        elif self.broken is None:
            self.broken = self._learn(message)

    def _learn(self, message: Message) -> Broken:
        """A neighbour that only waited too does not know whom to blame; this member may."""
        if message.suspect is None and self.asked is not None and time.monotonic() - self.asked > _GRACE_S:
            suspect, why = self.blame()
            if suspect is not None:
                return Broken(f"{message.reason}; here {why}", suspect)
        return Broken(message.reason, message.suspect)

    def _joined(self) -> list[Link]:
        return [link for link in (self.left, self.right) if link is not None]
