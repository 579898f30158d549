"""What two neighbours tell one another beside the data: are you there, where are you, this ring is broken."""

import contextlib
import socket
import struct
from dataclasses import dataclass

PING, PONG, BREAK, LEAVE = b"?", b"!", b"x", b">"
_HEAD = struct.Struct("!c?hQH")
_LONGEST = 400


@dataclass(frozen=True)
class Message:
    """One of them.

    Attributes:
        kind: PING, PONG, BREAK (the ring is of no use any more) or LEAVE (all that the sender had begun is done).
        operation: how many the sender has begun since the ring was made. busy: it is in the last of them.
        suspect, reason: of a BREAK or LEAVE, as in :class:`ft.systems.hsdp.ring.outcome.Outcome`.
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
    """Takes whole messages off the front of ``received``.

    Raises:
        ConnectionError: the other side says what cannot be.
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
    """This end of the connection that they go over."""

    def __init__(self, connection: socket.socket):
        self._connection, self._received = connection, bytearray()

    def fileno(self) -> int:
        return self._connection.fileno()

    def say(self, message: Message) -> None:
        """As far as it can be said at once: to who does not listen nothing more is said."""
        with contextlib.suppress(OSError):
            self._connection.send(pack(message))

    def hear(self) -> list[Message]:
        """What has come.

        Raises:
            ConnectionError: the other side has hung up.
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
