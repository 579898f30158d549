"""Control messages between neighbours in FT-HSDP's all-reduce ring: pings, and notifications that a ring has ended.

They are sent over a connection of their own beside the data connections. An operation is one all-reduce.
"""

import contextlib
import socket
import struct
from dataclasses import dataclass

PING, PONG, BREAK, LEAVE = b"?", b"!", b"x", b">"
_HEAD = struct.Struct("!c?hQH")
_LONGEST = 400
"""Maximum length of a reason, in bytes."""


@dataclass(frozen=True)
class Message:
    """One control message.

    Attributes:
        kind: PING, PONG (answer to a PING), BREAK (the ring is not usable any more) or LEAVE (the sender leaves the
            ring, and has completed all operations that it has begun).
        operation: number of operations that the sender has begun since the ring was connected.
        busy: whether the last of these operations is still under way at the sender.
        suspect: in a BREAK or LEAVE, index of the member that seems to be the cause; None if unknown.
        reason: in a BREAK or LEAVE, the cause in words.
    """

    kind: bytes
    operation: int = 0
    busy: bool = False
    suspect: int | None = None
    reason: str = ""


def pack(message: Message) -> bytes:
    """Encode a message."""
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
            raise ConnectionError("it has sent an invalid control message")
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
        """Send a message without blocking; bytes that the socket does not take are lost."""
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
