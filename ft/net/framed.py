"""The framed channel: an authenticated connection on which the processes of a run exchange messages and bulk data.

A channel begins with the handshake of :mod:`ft.net.handshake`. After that each end sends frames:

    frame: head | seal, 16 bytes | payload
    head:  kind, 4 bytes | rank i32 | step i64 | epoch i64 | offset u64 | length u64 | check u64

A payload is a message (a JSON object and byte strings) or bulk data, which is received into memory of the caller's.
``rank``, ``step`` and ``epoch`` say which state it belongs to; ``offset`` is the place of bulk data in that state. The
check of bulk data is its :func:`ft.net.framed.checksum`, that of a message a keyed hash. The seal is a keyed hash of
the head, of the number of frames sent before, and of the direction. Its key is derived from the token and from both
challenges of the handshake, so that a frame is valid once, in one place of one connection.

What a caller can rely on:

* A received head or message is what the other end has sent, and all frames arrive once and in order. Anything else is a
:class:`BadFrame`, after which the channel has to be closed.
* Damaged bulk data is reported, and the channel remains usable.
* A call that makes no progress for the channel's time limit raises TimeoutError; a lost connection raises
ConnectionError. :meth:`FramedChannel.shutdown` ends blocked calls from another thread.
* Memory is allocated for bytes received, not for bytes announced, and not before the handshake.

:class:`FramedChannel` blocks and carries bulk data. :class:`Stream` carries messages and never blocks, so that one
thread can serve many connections.
"""

import contextlib
import hashlib
import json
import socket
import struct
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ft.base import bounded_json
from ft.net.handshake import GREETING_BYTES, PROOF_BYTES, HandshakeRefused, NotAMember, Party, accept, dial, is_equal

_ROW = 8192


def checksum(data: bytes | bytearray | memoryview) -> int:
    """Return a 32-bit checksum, which is four times as fast to compute as a CRC-32 of all bytes.

    The data is divided into rows of 8 KiB, and the rows are added as vectors of 64-bit words. The checksum is the
    CRC-32 of the sum. (A CRC-32 of all bytes would take longer than the copy itself.) Damage within one row is detected
    as well as by CRC-32. Damage in several rows is missed only if it cancels out in every column. Swapped rows are
    missed, but neither memory nor a connection swaps rows.
    """
    rows = len(data) // _ROW
    if not rows:
        return zlib.crc32(data)
    import numpy  # processes that exchange messages alone start faster without it

    words = numpy.frombuffer(data, dtype="<u8", count=rows * _ROW // 8).reshape(rows, -1)
    return zlib.crc32(memoryview(data)[rows * _ROW :], zlib.crc32(numpy.add.reduce(words, axis=0)))


Bytes = bytes | bytearray | memoryview

MAX_MESSAGE = 256 << 20
_HEAD = struct.Struct("<4siqqQQQ")
_SEAL_BYTES, _CHECK_BYTES = 16, 8
HEAD_BYTES = _HEAD.size + _SEAL_BYTES
_NUMBER, _LENGTH = struct.Struct("<?Q"), struct.Struct("<I")
_PIECE, _AT_ONCE, _BUFFER = 1 << 20, 1 << 18, 4 << 20


class BadFrame(Exception):
    """The received bytes are not the frame that the other end has sent, or not one of this protocol."""


class Mark(NamedTuple):
    """The state that a frame belongs to.

    Attributes:
        rank: logical rank whose state it is; -1: any, or none.
        step: committed step of the state; -1: none.
        epoch: epoch, or lineage (number of the quorum), in which the step was committed; -1: any, or none.
    """

    rank: int = -1
    step: int = -1
    epoch: int = -1


class Head(NamedTuple):
    """The head of a frame.

    Attributes:
        kind: kind of the frame, 4 bytes, defined by the protocol that uses the channel.
        offset: place of bulk data in the state, in bytes.
        check: checksum of bulk data, or keyed hash of a message.
    """

    kind: bytes
    mark: Mark
    offset: int
    length: int
    check: int


@dataclass(frozen=True)
class ReceivedMessage:
    """A received message.

    Attributes:
        words: JSON values.
        bodies: byte strings.
    """

    kind: bytes
    mark: Mark
    words: dict[str, Any]
    bodies: list[bytes]


class Frames:
    """Makes and reads the frames of one end of a channel. It does no I/O.

    Args:
        theirs: the other end's challenge.
    """

    def __init__(self, party: Party, theirs: bytes):
        self._key, self._is_dialer = party.key(theirs), party.is_dialer
        self._sent = self._received = 0

    def message(self, kind: bytes, mark: Mark, words: dict[str, Any], bodies: Sequence[bytes]) -> list[Bytes]:
        """Return the pieces of the message that is to be sent next; see :meth:`FramedChannel.send`."""
        text = json.dumps([words, [len(body) for body in bodies]], separators=(",", ":")).encode()
        payload = [_LENGTH.pack(len(text)), text, *bodies]
        return [self.head(Head(kind, mark, 0, sum(map(len, payload)), self._check(payload))), *payload]

    def head(self, head: Head) -> bytes:
        """Return the head of the frame that is to be sent next, with its seal."""
        data = _HEAD.pack(head.kind, *head.mark, *head[2:])
        seal = self._seal(data, self._is_dialer, self._sent)
        self._sent += 1
        return data + seal

    def read_head(self, data: bytes) -> Head:
        """Return the head that was received next. Raise BadFrame if it is not the one that the other end has sent."""
        head, seal = data[: _HEAD.size], data[_HEAD.size :]
        if not is_equal(seal, self._seal(head, not self._is_dialer, self._received)):
            raise BadFrame("a head that does not fit its seal")
        self._received += 1
        kind, rank, step, epoch, offset, length, check = _HEAD.unpack(head)
        return Head(kind, Mark(rank, step, epoch), offset, length, check)

    def read_message(self, head: Head, payload: bytes | bytearray) -> ReceivedMessage:
        """Return the message with this head. Raise BadFrame if ``payload`` is not what the other end has sent."""
        if self._check([payload]) != head.check:
            raise BadFrame("a message that does not fit its hash")
        try:
            words, bodies = _unpack(payload)
        except (ValueError, TypeError, struct.error, RecursionError) as error:
            raise BadFrame(f"a message that makes no sense: {error}") from error
        return ReceivedMessage(head.kind, head.mark, words, bodies)

    def _seal(self, head: bytes, is_from_dialer: bool, number: int) -> bytes:
        place = _NUMBER.pack(is_from_dialer, number)
        return hashlib.blake2b(place + head, digest_size=_SEAL_BYTES, key=self._key).digest()

    def _check(self, payload: Sequence[Bytes]) -> int:
        digest = hashlib.blake2b(digest_size=_CHECK_BYTES, key=self._key)
        for piece in payload:
            digest.update(piece)
        return int.from_bytes(digest.digest())


class FramedChannel:
    """One end of a connection. One thread may send while another one receives; not more than one of each.

    Args:
        connection: connected stream socket; the channel owns it from now on.
        patience_s: time limit, see :meth:`be_patient`.

    Attributes:
        is_shut: whether this end has shut the connection down.
    """

    def __init__(self, connection: socket.socket, patience_s: float):
        self.socket, self.is_shut = connection, False
        self._frames: Frames | None = None
        self._scratch: memoryview | None = None
        connection.settimeout(None)
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            connection.setsockopt(socket.SOL_SOCKET, option, _BUFFER)
        self.be_patient(patience_s)

    def dial(self, token: str, purpose: str, limit_s: float) -> None:
        """Run the dialer's part of the handshake, before anything else; raises as :func:`ft.net.handshake.dial`."""
        party = Party(token, purpose, is_dialer=True)
        theirs, _ = dial(self.socket, party, limit_s)
        self._frames = Frames(party, theirs)

    def accept(self, token: str, purpose: str, limit_s: float) -> None:
        """Run the acceptor's part of the handshake, with the arguments of :meth:`dial`, before anything else.

        Raises as :func:`ft.net.handshake.accept` does.
        """
        party = Party(token, purpose, is_dialer=False)
        theirs, _ = accept(self.socket, party, limit_s)
        self._frames = Frames(party, theirs)
        self.write([party.seal(theirs)])

    def be_patient(self, seconds: float) -> None:
        """Set the longest time without progress of a blocking call, in seconds; 0: no limit.

        The kernel enforces it, so that a whole chunk of data can be one system call.
        """
        whole = int(seconds)
        limit = struct.pack("@ll", whole, int((seconds - whole) * 1e6))
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            self.socket.setsockopt(socket.SOL_SOCKET, option, limit)

    def _proved(self) -> "Frames":
        assert self._frames is not None, "the handshake comes first"
        return self._frames

    def send(self, kind: bytes, mark: Mark, words: dict[str, Any] | None = None, *bodies: bytes) -> None:
        """Send a message.

        Args:
            kind: kind of the frame, 4 bytes.
        """
        self.write(self._proved().message(kind, mark, words or {}, bodies))

    def pack(self, kind: bytes, mark: Mark, offset: int, data: Bytes, check: int) -> list[Bytes]:
        """Return the frame with bulk data that is to be sent next, in two pieces: the head, and ``data``."""
        return [self._proved().head(Head(kind, mark, offset, len(data), check)), data]

    def write(self, pieces: Sequence[Bytes]) -> None:
        """Send the pieces of a frame."""
        try:
            sent = self.socket.sendmsg(pieces)
            for piece in pieces:
                if sent < len(piece):
                    self.socket.sendall(memoryview(piece)[sent:])
                sent = max(0, sent - len(piece))
        except BlockingIOError as error:
            raise TimeoutError("the other end does not read") from error

    def receive(self) -> ReceivedMessage:
        """Receive a message.

        Raises:
            BadFrame: no valid message of at most 256 MiB was received.
        """
        head = self.next()
        if head.length > MAX_MESSAGE:
            raise BadFrame(f"a message of {head.length} bytes; at most {MAX_MESSAGE} are allowed")
        payload = bytearray()
        while len(payload) < head.length:
            piece = bytearray(min(_PIECE, head.length - len(payload)))
            self._fill(memoryview(piece))
            payload += piece
        return self._proved().read_message(head, payload)

    def next(self) -> Head:
        """Receive the head of the next frame. If it has bulk data, call :meth:`take` next.

        Raises:
            BadFrame: it is not the next head that the other end has sent.
        """
        data = memoryview(bytearray(HEAD_BYTES))
        self._fill(data)
        return self._proved().read_head(bytes(data))

    def take(self, head: Head, into: memoryview) -> bool:
        """Receive the bulk data of the frame whose head was received last.

        Args:
            into: memory for the data, of ``head.length`` bytes.

        Returns:
            whether the data matches its checksum.
        """
        if len(into) != head.length:
            raise BadFrame(f"{head.length} bytes of data instead of {len(into)}")
        self._fill(into)
        return checksum(into) == head.check

    def scratch(self, length: int) -> memoryview:
        """Return memory of ``length`` bytes, at most 1 MiB, that is reused by the next call."""
        if self._scratch is None:
            self._scratch = memoryview(bytearray(_PIECE))
        return self._scratch[:length]

    def shutdown(self) -> None:
        """Wake all threads blocked on this connection with ConnectionError. May be called from any thread."""
        self.is_shut = True
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.socket.close()

    def _fill(self, view: memoryview) -> None:
        while view:
            try:
                got = self.socket.recv_into(view, min(len(view), _PIECE), socket.MSG_WAITALL)
            except BlockingIOError as error:
                raise TimeoutError("the other end does not write") from error
            if not got:
                raise ConnectionError("the other end has closed the connection")
            view = view[got:]


class Stream:
    """One end of a connection that never blocks and carries messages. Only one thread may use it.

    The handshake is done while the other end's bytes are received. What a dialer sends before is sent after it.

    Args:
        connection: connected stream socket; the stream owns it from now on.
        purpose: name and version of the protocol, at most 16 ASCII characters.
        is_dialer: whether this end opened the connection.

    Attributes:
        socket: the socket.
        is_member: whether the other end has proved that it belongs to the run.
        is_closed: whether the owner of this end has closed it.
        since: time at which this end began, by the monotonic clock.
    """

    def __init__(self, connection: socket.socket, token: str, purpose: str, *, is_dialer: bool, address: str = ""):
        connection.setblocking(False)
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self.socket, self.address, self.since = connection, address, time.monotonic()
        self.is_closed = False
        self._party, self._theirs = Party(token, purpose, is_dialer=is_dialer), b""
        self._frames: Frames | None = None
        self._early: list[tuple[bytes, dict[str, Any] | None, Sequence[bytes]]] = []
        self._in, self._out = bytearray(), bytearray(b"" if is_dialer else self._party.greeting())
        self._head: Head | None = None

    @property
    def is_member(self) -> bool:
        return self._frames is not None

    @property
    def has_unsent(self) -> bool:
        """Whether bytes wait until the other end reads."""
        return bool(self._out)

    def send(self, kind: bytes, words: dict[str, Any] | None = None, bodies: Sequence[bytes] = ()) -> None:
        """Send a message; :meth:`flush` sends later what the kernel does not take at once.

        Raises:
            OSError: the other end is gone, or does not read (256 MiB wait for it).
        """
        if self._frames is None:
            self._early.append((kind, words, bodies))
            return
        for piece in self._frames.message(kind, Mark(), words or {}, bodies):
            self._out += piece
        if len(self._out) > MAX_MESSAGE:
            raise ConnectionError("it does not read")
        self.flush()

    def flush(self) -> None:
        """Send what waits, as far as the kernel takes it. Raise OSError if the other end is gone."""
        with contextlib.suppress(BlockingIOError):
            while self._out:
                with memoryview(self._out)[:_AT_ONCE] as piece:
                    sent = self.socket.send(piece)
                del self._out[:sent]

    def receive(self) -> list[ReceivedMessage]:
        """Return the messages that have arrived, without waiting for more. Call it when the socket is readable.

        Raises:
            OSError: the other end is gone.
            NotAMember: the other end uses another protocol, or does not prove that it belongs to the run.
            HandshakeRefused: the other end says that it belongs to another run.
            BadFrame: the bytes received are not what a member of the run has sent.
        """
        try:
            piece = self.socket.recv(_AT_ONCE)
        except BlockingIOError:
            return []
        if not piece:
            raise ConnectionError("it has closed the connection")
        self._in += piece
        frames = self._frames or self._admitted()
        messages: list[ReceivedMessage] = []
        while frames is not None and (message := self._next(frames)) is not None:
            messages.append(message)
        return messages

    def close(self) -> None:
        self.socket.close()
        self.is_closed = True

    def _admitted(self) -> "Frames | None":
        """Take part in the handshake; return the frames of the connection once it is done."""
        if not self._theirs:
            if not self._party.may_begin(bytes(self._in[:GREETING_BYTES])):
                raise NotAMember("it uses another protocol")
            if len(self._in) < GREETING_BYTES:
                return None
            self._theirs = self._party.read_greeting(self._take(GREETING_BYTES))
            if self._party.is_dialer:
                self._out += self._party.greeting() + self._party.seal(self._theirs)
                self.flush()
        if len(self._in) < PROOF_BYTES:
            return None
        sealed, is_dialer = self._take(PROOF_BYTES), self._party.is_dialer
        if is_dialer and sealed == self._party.REFUSAL:
            raise HandshakeRefused
        if self._party.open(self._theirs, sealed) is None:
            self._out += b"" if is_dialer else self._party.REFUSAL
            self.flush()
            raise NotAMember("it gives no proof" if is_dialer else "its token is not that of this run")
        self._frames = Frames(self._party, self._theirs)
        self._out += b"" if is_dialer else self._party.seal(self._theirs)
        early, self._early = self._early, []
        for each in early:
            self.send(*each)
        self.flush()
        return self._frames

    def _next(self, frames: Frames) -> ReceivedMessage | None:
        if self._head is None:
            if len(self._in) < HEAD_BYTES:
                return None
            self._head = frames.read_head(self._take(HEAD_BYTES))
            if self._head.length > MAX_MESSAGE:
                raise BadFrame(f"a message of {self._head.length} bytes; at most {MAX_MESSAGE} are allowed")
        if len(self._in) < self._head.length:
            return None
        head, self._head = self._head, None
        return frames.read_message(head, self._take(head.length))

    def _take(self, length: int) -> bytes:
        data = bytes(memoryview(self._in)[:length])
        del self._in[:length]
        return data


def _unpack(payload: bytes | bytearray) -> tuple[dict[str, Any], list[bytes]]:
    """Return the JSON values and the byte strings of a message."""
    (length,) = _LENGTH.unpack_from(payload)
    at = _LENGTH.size + length
    words, lengths = bounded_json.loads(payload[_LENGTH.size : at], non_finite=True)
    if not isinstance(words, dict):
        raise ValueError("values that are no object")
    bodies = []
    for size in lengths:
        bodies.append(bytes(payload[at : at + size]))
        at += size
    if at != len(payload):
        raise ValueError(f"{len(payload)} bytes, {at} announced")
    return words, bodies
