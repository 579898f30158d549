"""Wire format and handshake between leaders, agents and the quorum server.

    frame: magic "FTQU" | length u32 | CRC-32 u32 | JSON object of that length, with a "kind"

A connection starts with the handshake of :mod:`ft.net.handshake`, in frames. Until the handshake is done, frames are
limited to 512 bytes and their content is not trusted. No function of this module blocks, so that one thread can serve
many connections.
"""

import contextlib
import json
import socket
import struct
import zlib
from collections.abc import Iterator
from typing import Any

from ft.base import bounded_json
from ft.base.errors import FtError, UserError
from ft.net.codec import BadMessage
from ft.net.handshake import Party, parse_challenge

MAGIC = b"FTQU"
PURPOSE = "ft-quorum-2"
MAX_FRAME = 64 << 20
_STRANGERS_FRAME = 512
_HEAD = struct.Struct(">4sII")
HEAD_SIZE = _HEAD.size
_PIECE = 1 << 16
_MOST_UNSENT = 256 << 20


class Broken(FtError):
    """The connection is unusable: closed by the other end, or it carried data that no member of the run sends."""


def pack(message: dict[str, Any]) -> bytes:
    """Encode ``message`` as a frame."""
    return wrap(json.dumps(message, separators=(",", ":")).encode())


def wrap(body: bytes) -> bytes:
    """Return the frame with this body."""
    return _HEAD.pack(MAGIC, len(body), zlib.crc32(body)) + body


def unpack(body: bytes) -> dict[str, Any]:
    """Decode the message in a frame's body.

    Raises:
        BadMessage: the body is not a valid message.
    """
    try:
        message = bounded_json.loads(str(body, "utf-8"), non_finite=True)
    except (ValueError, RecursionError) as error:
        raise BadMessage(f"no JSON: {bytes(body[:100])!r}") from error
    if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
        raise BadMessage(f"a message without a kind: {bytes(body[:100])!r}")
    return message


class Channel:
    """One end of a connection, with its handshake and its buffers.

    Args:
        own: connected or connecting socket; it becomes non-blocking.
        token: token of the run.
        is_host: whether this end accepted the connection.

    Attributes:
        socket: the socket.
        is_known: whether the other end has proved that it is a member of the run.
        wants_write: whether bytes are waiting to be sent.
    """

    def __init__(self, own: socket.socket, token: str, is_host: bool):
        own.setblocking(False)
        if own.family != socket.AF_UNIX:
            own.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            own.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self.socket, self.is_known = own, False
        self._party, self._is_host = Party(token, PURPOSE, is_dialer=not is_host), is_host
        self._theirs = b""  # the other end's challenge
        self._in, self._out = bytearray(), bytearray()
        self._early: list[bytes] = []
        if is_host:
            self._push(pack(self._challenge("challenge")))

    @property
    def wants_write(self) -> bool:
        return bool(self._out)

    def fileno(self) -> int:
        return self.socket.fileno()

    def send(self, frame: bytes) -> None:
        """Send a packed frame without blocking. What the kernel does not take at once is sent by later calls of
        ``flush``.

        Before the handshake is done, the frame is queued until then.

        Raises:
            Broken: the other end is gone, or too many bytes (256 MiB) wait because it does not read.
        """
        if not self.is_known:
            self._early.append(frame)
            return
        self._push(frame)

    def flush(self) -> None:
        """Send the buffered bytes, as far as the kernel takes them.

        Raises:
            Broken: the other end is gone.
        """
        while self._out:
            try:
                with memoryview(self._out)[:_PIECE] as piece:
                    sent = self.socket.send(piece)
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                raise Broken(f"cannot write: {error.strerror or error}") from error
            del self._out[:sent]

    def read(self) -> Iterator[bytes]:
        """Yield the bodies of complete frames, without those of the handshake. Call it when the socket is readable.

        Raises:
            Broken: the other end is gone, or is not a member of the run.
            UserError: the other end refuses this end's token.
        """
        while True:
            try:
                piece = self.socket.recv(_PIECE)
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                raise Broken(f"cannot read: {error.strerror or error}") from error
            if not piece:
                raise Broken("the other end has closed the connection")
            self._in += piece
            yield from self._frames()
            if len(piece) < _PIECE:
                return

    def close(self) -> None:
        self.socket.close()

    def _frames(self) -> Iterator[bytes]:
        while len(self._in) >= _HEAD.size:
            magic, length, checksum = _HEAD.unpack_from(self._in)
            limit = MAX_FRAME if self.is_known else _STRANGERS_FRAME
            if magic != MAGIC or length > limit:
                raise Broken(f"a frame that begins with {magic!r} and length {length}; at most {limit} is allowed")
            end = _HEAD.size + length
            if len(self._in) < end:
                return
            body = bytes(memoryview(self._in)[_HEAD.size : end])
            del self._in[:end]
            if zlib.crc32(body) != checksum:
                raise Broken("a frame with a wrong checksum")
            if self.is_known:
                yield body
            else:
                self._shake(unpack(body))

    def _push(self, frame: bytes) -> None:
        if not self._out:
            try:
                sent = self.socket.send(frame)
            except (BlockingIOError, InterruptedError):
                sent = 0
            except OSError as error:
                raise Broken(f"cannot write: {error.strerror or error}") from error
            frame = frame[sent:] if sent < len(frame) else b""
        self._out += frame
        if len(self._out) > _MOST_UNSENT:
            raise Broken(f"the other end does not read: {len(self._out)} bytes wait")

    def _shake(self, message: dict[str, Any]) -> None:
        """Process one message of the handshake: challenge, answer with a challenge of its own, welcome with a proof."""
        kind, given = message["kind"], _bytes(message.get("answer"))
        if kind == "refused" and not self._is_host:
            raise UserError(
                "the quorum server belongs to another run: it refuses this one's token",
                "start each run with a --run-dir of its own",
            )
        if self._is_host and kind == "answer":
            self._theirs = _challenge_of(message)
            if not self._party.check(given, self._theirs):
                with contextlib.suppress(Broken):
                    self._push(pack({"kind": "refused"}))
                raise Broken("a wrong token")
            self._push(pack({"kind": "welcome", "answer": self._party.answer(self._theirs).hex()}))
            self._enter()
        elif not self._is_host and kind == "challenge":
            self._theirs = _challenge_of(message)
            self._push(pack(self._challenge("answer") | {"answer": self._party.answer(self._theirs).hex()}))
        elif not self._is_host and kind == "welcome":
            if not self._party.check(given, self._theirs):
                raise Broken("this is no server of the run")
            self._enter()
        else:
            raise Broken(f"{kind[:20]!r} in a handshake")

    def _challenge(self, kind: str) -> dict[str, Any]:
        return {"kind": kind, "protocol": PURPOSE, "nonce": self._party.challenge.hex()}

    def _enter(self) -> None:
        self.is_known = True
        for frame in self._early:
            self._push(frame)
        self._early.clear()


def parse_where(where: str) -> tuple[str, int]:
    """Split "tcp://HOST:PORT" into (host, port).

    Raises:
        UserError: ``where`` does not have that form.
    """
    host, _, port = where.removeprefix("tcp://").rpartition(":")
    if not where.startswith("tcp://") or not host or not port.isdecimal() or int(port) > 65535:
        raise UserError(f"{where!r} is no address of a quorum server", "give tcp://HOST:PORT")
    return host, int(port)


def _challenge_of(message: dict[str, Any]) -> bytes:
    """Return the other end's challenge. Raise Broken if the message has none of this protocol."""
    challenge = parse_challenge(message.get("nonce"))
    if challenge is None or message.get("protocol") != PURPOSE:
        raise Broken(f"protocol {str(message.get('protocol'))[:20]!r} in a handshake instead of {PURPOSE!r}")
    return challenge


def _bytes(text: Any) -> bytes:
    """Decode hexadecimal ``text``; return b"" if it is invalid."""
    try:
        return bytes.fromhex(text) if isinstance(text, str) else b""
    except ValueError:
        return b""
