"""Connections of one member of FT-HSDP's all-reduce ring to its two neighbours, for one quorum.

A quorum is the set of replicas that take part in a training step; each of them has one member in the ring. The left
neighbour sends data to this member, and the right neighbour receives data from it. Each neighbour has one connection
for control messages (pings, failures) and one or more for data. An operation is one all-reduce.
"""

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
"""Seconds to wait for the last control message of a neighbour whose data connection has broken."""


@dataclass
class Link:
    """Connections to one neighbour.

    Attributes:
        side: LEFT or RIGHT.
        index: index of the neighbour among the members.
        control: connection for control messages.
        data: connections that carry data.
        answer: answer of the neighbour to the last ping; None if it has not answered.
        gone: why the neighbour will send nothing new, None as long as it may; data that were sent before may still
            arrive.
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
    """Connections to both neighbours.

    Attributes:
        left: link to the left neighbour, None until it is connected.
        right: link to the right neighbour, None until it is connected.
        broken: why the ring is unusable even for the operation under way; None while it is usable. Never reset.
        operation: number of operations begun since the ring was connected.
        busy: whether the last of these operations is under way.
        asked: time at which the neighbours were pinged, None if they were not pinged since the last progress.
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
        """Take over the connections to one neighbour; the first connection is for control messages.

        Args:
            side: LEFT or RIGHT.
            index: index of the neighbour among the members.
            connections: the connections to this neighbour.
        """
        link = Link(side, index, Control(connections[0]), connections[1:])
        setattr(self, side, link)
        self._poller.watch(link.control.fileno(), READ, lambda: self._hear(link))

    def ask(self) -> None:
        """Ping both neighbours."""
        self.asked = time.monotonic()
        for link in self._joined():
            link.answer = None
            link.control.say(Message(PING))

    def blame(self) -> tuple[int | None, str]:
        """Return the index of the neighbour (or of the member that it blames) that causes a stall, and the reason.

        The index is None if both neighbours wait, too.
        """
        if gone := next((link.gone for link in self._joined() if link.gone), None):
            return gone.suspect, gone.reason
        side, why = blame(self.operation, self.left.answer, self.right.answer)
        link = {LEFT: self.left, RIGHT: self.right}.get(side)
        return (link.index, f"{link.name()} {why}") if link else (None, why)

    def nothing_moves(self, limit_s: float) -> Broken:
        """Return the exception for a stall, with the cause that the neighbours' answers point to."""
        suspect, why = self.blame()
        return Broken(f"nothing has moved for {limit_s:g} s: {why}", suspect)

    def lost(self, link: Link, how: str) -> Broken:
        """Return why the data connection of ``link`` has ended.

        This is the reason that a neighbour has sent in a control message. Without such a message, the neighbour itself
        is the cause.
        """
        deadline = time.monotonic() + _GRACE_S
        words = select.poll()
        words.register(link.control, select.POLLIN)
        while self.broken is None and link.gone is None and (left := deadline - time.monotonic()) > 0:
            if words.poll(left * 1e3):
                self._hear(link)
        return self.broken or link.gone or Broken(f"{link.name()} is lost: {how}", link.index)

    def useless(self) -> Broken | None:
        """Return why no new operation can be done with these connections; None if one can."""
        return self.broken or next((link.gone for link in self._joined() if link.gone), None)

    def close(self, why: Broken) -> None:
        """Send ``why`` to the neighbours, then drop all connections.

        In the middle of an operation the message is BREAK: every member passes it on, and the operation ends on all of
        them. Otherwise the message is LEAVE: this member has completed its last operation, so the neighbours complete
        that operation as well, with the data that this member has sent.
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
                self.broken = link.gone  # the neighbour will never begin the operation under way
        elif self.broken is None:
            self.broken = self._learn(message)

    def _learn(self, message: Message) -> Broken:
        """Return the cause of a BREAK message.

        If the neighbour knows no cause, because it was only waiting, use the cause that this member can find.
        """
        if message.suspect is None and self.asked is not None and time.monotonic() - self.asked > _GRACE_S:
            suspect, why = self.blame()
            if suspect is not None:
                return Broken(f"{message.reason}; here {why}", suspect)
        return Broken(message.reason, message.suspect)

    def _joined(self) -> list[Link]:
        return [link for link in (self.left, self.right) if link is not None]
