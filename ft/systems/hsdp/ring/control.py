"""Control messages between ring neighbours: pings, progress in operations, and the end of a ring."""

import contextlib
import socket
import struct
from dataclasses import dataclass

PING, PONG, BREAK, LEAVE = b"?", b"!", b"x", b">"
_HEAD = struct.Struct("!c?hQH")
_LONGEST = 400


@dataclass(frozen=True)
class Message:
    """One control message.

    Attributes:
        kind: PING, PONG, BREAK (the ring is not usable any more) or LEAVE (all operations that the sender had begun are
            done).
        operation: number of operations that the sender has begun since the ring was made.
        busy: the sender is in the last of them.
        suspect: in a BREAK or LEAVE, as in :class:`ft.systems.hsdp.ring.outcome.Outcome`.
        reason: in a BREAK or LEAVE, as in :class:`ft.systems.hsdp.ring.outcome.Outcome`.
    """

    kind: bytes
    operation: int = 0
    busy: bool = False
    suspect: int | None = None
    reason: str = ""


def pack(message: Message) -> bytes:
    reason = message.reason.encode()[:_LONGEST]
    suspect = -1 if message.suspect is None else message.suspect
    return _HEAD.pack(message.kind, message.busy, suspect, message.operation, len(reason)) + reason


def unpack(received: bytearray) -> list[Message]:
    """Remove complete messages from the front of ``received`` and return them.

    Raises:
        ConnectionError: the bytes are no valid message.
    """
    found = []
    while len(received) >= _HEAD.size:
        kind, busy, suspect, operation, length = _HEAD.unpack_from(received)
        if kind not in (PING, PONG, BREAK, LEAVE) or length > _LONGEST:
            raise ConnectionError("it says what no member of a ring says")
        if len(received) < _HEAD.size + length:
            break
        reason = bytes(received[_HEAD.size : _HEAD.size + length]).decode(errors="replace")
        del received[: _HEAD.size + length]
        found.append(Message(kind, operation, busy, None if suspect < 0 else suspect, reason))
    return found


class Control:
    """One end of a connection for control messages."""

    def __init__(self, connection: socket.socket):
        self._connection, self._received = connection, bytearray()

    def fileno(self) -> int:
        return self._connection.fileno()

    def say(self, message: Message) -> None:
        """Send a message as far as possible without blocking; the rest is lost if the peer does not read."""
        with contextlib.suppress(OSError):
            self._connection.send(pack(message))

    def hear(self) -> list[Message]:
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
