"""Connections of one member of FT-HSDP's all-reduce ring to its two neighbours, for one quorum.

Each replica of the quorum has one member in the ring. The left neighbour sends data to this member, and the right
neighbour receives data from it. Each neighbour has one connection for control messages (pings, and notifications that a
ring has ended) and one or more for data. One thread waits for all of them, with poll(2). An operation is one
all-reduce.
"""

import contextlib
import os
import select
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass

from ft.systems.hsdp.ring.blame import LEFT, RIGHT, blame
from ft.systems.hsdp.ring.options import Broken

READ, WRITE = select.POLLIN, select.POLLOUT


class Poller:
    """The file descriptors for whose events the ring's thread waits, each with a callback."""

    def __init__(self):
        self._poll = select.poll()
        self._calls: dict[int, Callable[[], None]] = {}
        self._waker, self._alarm = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._poll.register(self._waker, READ)

    def watch(self, descriptor: int, events: int, call: Callable[[], None]) -> None:
        """Have :meth:`wait` call ``call`` when one of ``events``, or an error, occurs."""
        self._poll.register(descriptor, events)
        self._calls[descriptor] = call

    def change(self, descriptor: int, events: int) -> None:
        self._poll.modify(descriptor, events)

    def forget(self, descriptor: int) -> None:
        if self._calls.pop(descriptor, None) is not None:
            self._poll.unregister(descriptor)

    def wait(self, limit_s: float | None) -> None:
        """Wait for events, for ``limit_s`` seconds at most (None: no limit), and call their callbacks."""
        for descriptor, _ in self._poll.poll(None if limit_s is None else max(0.0, limit_s * 1e3)):
            if descriptor == self._waker:
                os.read(self._waker, 4096)
            elif call := self._calls.get(descriptor):  # an earlier call may have removed it
                call()

    def wake(self) -> None:
        """End the present :meth:`wait`, or the next one. Thread-safe."""
        with contextlib.suppress(BlockingIOError):  # the pipe is full, so the thread will wake
            os.write(self._alarm, b"w")

    def close(self) -> None:
        os.close(self._waker)
        os.close(self._alarm)


PING, PONG, BREAK, LEAVE = b"?", b"!", b"x", b">"
_HEAD = struct.Struct("!c?hQH")
_LONGEST = 400
"""Maximum length of a reason, in bytes."""


@dataclass(frozen=True)
class ControlMessage:
    """One control message.

    Attributes:
        kind: PING, PONG (answer to a PING), BREAK (the ring is not usable any more) or LEAVE (the sender leaves the
            ring, and has completed all operations that it has begun).
        operation: number of operations that the sender has begun since the ring was connected.
        busy: whether the last of these operations is still under way at the sender.
        suspect: index of the member that seems to be the cause; None if unknown.
    """

    kind: bytes
    operation: int = 0
    busy: bool = False
    suspect: int | None = None
    reason: str = ""


def pack(message: ControlMessage) -> bytes:
    """Encode a message."""
    reason = message.reason.encode()[:_LONGEST]
    suspect = -1 if message.suspect is None else message.suspect
    return _HEAD.pack(message.kind, message.busy, suspect, message.operation, len(reason)) + reason


def unpack(received: bytearray) -> list[ControlMessage]:
    """Remove complete messages from the front of ``received`` and return them.

    Raises:
        ConnectionError: the bytes are no valid message.
    """
    found = []
    while len(received) >= _HEAD.size:
        kind, busy, suspect, operation, length = _HEAD.unpack_from(received)
        if kind not in (PING, PONG, BREAK, LEAVE) or length > _LONGEST:
            raise ConnectionError("it has sent an invalid control message")
        if len(received) < _HEAD.size + length:
            break
        reason = bytes(received[_HEAD.size : _HEAD.size + length]).decode(errors="replace")
        del received[: _HEAD.size + length]
        found.append(ControlMessage(kind, operation, busy, None if suspect < 0 else suspect, reason))
    return found


class Control:
    """One end of a connection for control messages."""

    def __init__(self, connection: socket.socket):
        self._connection, self._received = connection, bytearray()

    def fileno(self) -> int:
        return self._connection.fileno()

    def say(self, message: ControlMessage) -> None:
        """Send a message without blocking; bytes that the socket does not take are lost."""
        with contextlib.suppress(OSError):
            self._connection.send(pack(message))

    def hear(self) -> list[ControlMessage]:
        """Return the messages that have arrived.

        Raises:
            ConnectionError: the peer has closed the connection, or it broke.
        """
        try:
            said = self._connection.recv(4096)
        except BlockingIOError:
            return []
        except OSError as error:
            raise ConnectionError(f"its connection broke ({error.strerror})") from error
        if not said:
            raise ConnectionError("it closed its connection")
        self._received += said
        return unpack(self._received)

    def close(self) -> None:
        self._connection.close()


_GRACE_S = 0.05
"""Seconds to wait for the last control message of a neighbour whose data connection has broken."""


@dataclass
class RingLink:
    """Connections to one neighbour.

    Attributes:
        answer: answer of the neighbour to the last ping; None if it has not answered.
        gone: why the neighbour will send nothing new, None as long as it may; data that were sent before may still
            arrive.
    """

    side: str
    index: int
    control: Control
    data: list[socket.socket]
    answer: ControlMessage | None = None
    gone: Broken | None = None

    def name(self) -> str:
        return f"the {self.side} neighbour, member {self.index},"


class Links:
    """Connections to both neighbours.

    Attributes:
        broken: why the ring is unusable even for the operation under way; None while it is usable. Never reset.
        busy: whether the last of these operations is under way.
        asked: time at which the neighbours were pinged, None if they were not pinged since the last progress.
    """

    def __init__(self, poller: Poller):
        self.left: RingLink | None = None
        self.right: RingLink | None = None
        self.broken: Broken | None = None
        self.operation, self.busy = 0, False
        self.asked: float | None = None
        self._poller = poller
        self._closed = False

    def join(self, side: str, index: int, connections: list[socket.socket]) -> None:
        """Take over the connections to one neighbour; the first connection is for control messages.

        Args:
            connections: the connections to this neighbour.
        """
        link = RingLink(side, index, Control(connections[0]), connections[1:])
        setattr(self, side, link)
        self._poller.watch(link.control.fileno(), READ, lambda: self._hear(link))

    def ask(self) -> None:
        """Ping both neighbours."""
        self.asked = time.monotonic()
        for link in self._joined():
            link.answer = None
            link.control.say(ControlMessage(PING))

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

    def lost(self, link: RingLink, how: str) -> Broken:
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
            link.control.say(ControlMessage(kind, self.operation, suspect=why.suspect, reason=why.reason))
        for link in self._joined():
            for connection in link.data:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
                connection.close()
            link.control.close()

    def _hear(self, link: RingLink) -> None:
        try:
            for message in link.control.hear():
                self._take(link, message)
        except ConnectionError as error:
            self._poller.forget(link.control.fileno())
            link.gone = link.gone or Broken(f"{link.name()} is lost: {error}", link.index)

    def _take(self, link: RingLink, message: ControlMessage) -> None:
        if message.kind == PING:
            link.control.say(ControlMessage(PONG, self.operation, self.busy))
        elif message.kind == PONG:
            link.answer = message
        elif message.kind == LEAVE:
            link.gone = Broken(message.reason, message.suspect)
            if self.busy and message.operation < self.operation and self.broken is None:
                self.broken = link.gone  # the neighbour will never begin the operation under way
        elif self.broken is None:
            self.broken = self._learn(message)

    def _learn(self, message: ControlMessage) -> Broken:
        """Return the cause of a BREAK message.

        If the neighbour knows no cause, because it was only waiting, use the cause that this member can find.
        """
        if message.suspect is None and self.asked is not None and time.monotonic() - self.asked > _GRACE_S:
            suspect, why = self.blame()
            if suspect is not None:
                return Broken(f"{message.reason}; here {why}", suspect)
        return Broken(message.reason, message.suspect)

    def _joined(self) -> list[RingLink]:
        return [link for link in (self.left, self.right) if link is not None]
