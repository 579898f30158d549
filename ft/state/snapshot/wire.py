"""The wire format of connections between snapshot servers, which start with the handshake of :mod:`ft.net.handshake`.

    frame:  magic "FTSN" | version u16 | 0 u16 | length u32 | checksum u32 | header: JSON object of that length
    body:   a table and an envelope of the lengths that the header announces
    chunks: up to 1 MiB each, after its index u32 and its checksum u32 (:func:`ft.state.snapshot.layout.checksum`)

Everything is checked before it is used: bytes from an unauthenticated peer cost a connection, but no memory.
"""

import contextlib
import json
import socket
import struct
from collections.abc import Callable
from typing import Any

from ft.net.handshake import Party, accept, dial
from ft.state.snapshot.buffers import Part
from ft.state.snapshot.layout import CHUNK, FORMAT, checksum

MAGIC = b"FTSN"
PURPOSE = "ft-snapshot-2"
MAX_HEADER = 64 << 10
MAX_BODY = 256 << 20
_FRAME, _CHUNK_HEAD = struct.Struct("<4sHHII"), struct.Struct("<II")
_BUFFER = 4 << 20


class BadFrame(Exception):
    """The received data is not a frame of this version, or its content is invalid."""


class Wire:
    """One connection.

    Reads and writes block until they are complete. They raise TimeoutError after ``patience_s`` seconds without
    progress, and ConnectionError if the other end is gone.

    Attributes:
        is_shut: whether this end has shut the connection down.
        disturb: for fault injection: returns what is sent instead of a chunk, from the chunk's index, the number of
            chunks and the pieces of the chunk.
    """

    def __init__(self, connection: socket.socket, patience_s: float):
        self._socket = connection
        self.is_shut = False
        self.disturb: Callable[[int, int, list], list[list]] | None = None
        connection.settimeout(None)
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            connection.setsockopt(socket.SOL_SOCKET, option, _BUFFER)
        self.be_patient(patience_s)

    def be_patient(self, seconds: float) -> None:
        """Set the time limit of one blocking call; 0: none. The kernel enforces it, so a whole chunk is one call."""
        whole = int(seconds)
        limit = struct.pack("@ll", whole, int((seconds - whole) * 1e6))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    def greet(self, token: str, limit_s: float) -> None:
        """Run the dialer's part of the handshake. Raises as :func:`ft.net.handshake.dial` does."""
        dial(self._socket, Party(token, PURPOSE, is_dialer=True), limit_s)

    def welcome(self, token: str, limit_s: float) -> None:
        """Run the acceptor's part of the handshake. Raises as :func:`ft.net.handshake.accept` does."""
        party = Party(token, PURPOSE, is_dialer=False)
        theirs, _ = accept(self._socket, party, limit_s)
        self._send([party.seal(theirs)])

    def send(self, header: dict[str, Any], *bodies: bytes) -> None:
        text = json.dumps(header, separators=(",", ":")).encode()
        if len(text) > MAX_HEADER:
            raise BadFrame(f"a header of {len(text)} bytes; at most {MAX_HEADER} are allowed")
        self._send([_FRAME.pack(MAGIC, FORMAT, 0, len(text), checksum(text)), text, *bodies])

    def receive(self) -> dict[str, Any]:
        """Receive and return the next header.

        Raises:
            BadFrame: the received data is not a valid frame.
        """
        magic, version, _, length, expected = _FRAME.unpack(self.take(_FRAME.size, _FRAME.size))
        if magic != MAGIC:
            raise BadFrame(f"starts with {bytes(magic)!r}: no snapshot peer")
        if version != FORMAT:
            raise BadFrame(f"speaks version {version} of the snapshot format, this end version {FORMAT}")
        text = self.take(length, MAX_HEADER)
        if checksum(text) != expected:
            raise BadFrame("a header with a wrong checksum")
        try:
            header = json.loads(text)
        except ValueError as error:
            raise BadFrame(f"a header that is no JSON: {error}") from error
        if not isinstance(header, dict) or not isinstance(header.get("kind"), str):
            raise BadFrame("a header without a kind")
        return header

    def take(self, length: int, limit: int = MAX_BODY) -> bytearray:
        """Receive and return the next ``length`` bytes; raise BadFrame if ``length`` exceeds ``limit``."""
        if not 0 <= length <= limit:
            raise BadFrame(f"{length} bytes announced; at most {limit} are allowed")
        data = bytearray()
        while len(data) < length:  # piece by piece: allocate for bytes received, not for bytes announced
            piece = bytearray(min(CHUNK, length - len(data)))
            self._fill(memoryview(piece))
            data += piece
        return data

    def send_part(self, part: Part, ready: Callable[[int], int] | None = None) -> None:
        """Send ``part`` with its stored checksums; ``ready(n)`` waits for n chunks and returns how many are there."""
        available = len(part.checksums) if ready is None else 0
        for index, _ in enumerate(part.checksums):
            if index >= available:
                available = ready(index + 1)
            pieces = [_CHUNK_HEAD.pack(index, part.checksums[index]), part.chunk(index)]
            for sent in [pieces] if self.disturb is None else self.disturb(index, len(part.checksums), pieces):
                self._send(sent)

    def receive_part(self, part: Part) -> int | None:
        """Receive ``part`` and its checksums; return the index of the first damaged chunk, None if all are intact.

        A chunk that arrives out of order counts as damaged, because its own checksum does not cover its index.
        """
        damaged = None
        head = memoryview(bytearray(_CHUNK_HEAD.size))
        for index in range(len(part.checksums)):
            chunk = part.chunk(index)
            self._fill(head)
            self._fill(chunk)
            place, part.checksums[index] = _CHUNK_HEAD.unpack(head)
            if damaged is None and (place != index or checksum(chunk) != part.checksums[index]):
                damaged = index
        return damaged

    def shutdown(self) -> None:
        """Wake all threads blocked on this connection with ConnectionError. May be called from any thread."""
        self.is_shut = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()

    def _send(self, pieces: list) -> None:
        try:
            sent = self._socket.sendmsg(pieces)
            for piece in pieces:
                if sent < len(piece):
                    self._socket.sendall(memoryview(piece)[sent:])
                sent = max(0, sent - len(piece))
        except BlockingIOError as error:
            raise TimeoutError("the other end does not read") from error

    def _fill(self, view: memoryview) -> None:
        while view:
            try:
                got = self._socket.recv_into(view, min(len(view), CHUNK), socket.MSG_WAITALL)
            except BlockingIOError as error:
                raise TimeoutError("the other end does not write") from error
            if not got:
                raise ConnectionError("the other end has closed the connection")
            view = view[got:]
