"""The protocol between two MPI relays: byte streams between workers, as frames in MPI messages, with flow control.

Each end of a stream is a relay with a socket to one worker. A frame is a header and, for some kinds, bytes:

    OPEN name    a worker requests a stream to worker ``name``; answered by OPENED, or by RESET with the reason
    DATA bytes   data; at most WINDOW bytes may be sent beyond the bytes that the other end has credited
    CREDIT n     n more bytes were passed on to the worker at this end
    END          end of data: the worker has closed its socket
    RESET why    the stream was aborted

Because of this flow control, a worker that reads slowly or not at all delays only the worker that writes to it, whose
socket becomes full.
"""

import contextlib
import socket
import struct
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy

OPEN, OPENED, DATA, CREDIT, END, RESET = range(1, 7)
HEAD = struct.Struct("<BBxxIQI")
WINDOW = 4 << 20
PIECE = 512 << 10
_BUFFER = 4 << 20

Key = tuple[int, int, bool]
"""One end of a stream.

(MPI rank of the relay that opened the stream, number of the stream at that relay, whether this end is the opening one).
"""


def other(key: Key) -> Key:
    """Return the key of the other end of the stream."""
    return key[0], key[1], not key[2]


def pack(kind: int, to: Key, number: int = 0, rest: bytes = b"") -> bytes:
    """Encode a frame for the end ``to``.

    Args:
        kind: kind of the frame, such as DATA.
        to: end of the stream that receives the frame.
        number: number in the header, whose meaning depends on the kind.
        rest: bytes after the header.
    """
    return HEAD.pack(kind, to[2], to[0], to[1], number) + rest


def room(length: int) -> memoryview:
    """Allocate uninitialised memory for a frame: initialising it, as ``bytearray`` does, costs as much as a copy."""
    return memoryview(numpy.empty(length, numpy.uint8))


def unpack(frame: bytes | memoryview) -> tuple[int, Key, int, memoryview]:
    """Return (kind of the frame, end of the stream that it is addressed to, number, the rest of the frame).

    Raises:
        struct.error: the bytes are no frame.
    """
    kind, dialled, rank, number, count = HEAD.unpack_from(frame)
    return kind, (rank, number, bool(dialled)), count, memoryview(frame)[HEAD.size :]


@dataclass
class Stream:
    """One end of a stream.

    Attributes:
        peer: MPI rank of the relay at the other end.
        sock: non-blocking socket to this node's worker; the relay closes it.
        send: function that sends a frame to the relay with a given rank.
        out: data that the worker has not accepted yet.
        credit: number of bytes that may be sent to the other end.
        owed: number of bytes passed on to the worker and not credited to the other end yet.
        is_open: whether the other end has accepted the stream.
        ends: whether the other end has sent all its data, so that no data follows ``out``.
        over: whether the stream has ended and the relay has to close the socket.
    """

    key: Key
    peer: int
    sock: socket.socket
    send: Callable[[int, bytes | memoryview], None]
    out: deque[memoryview] = field(default_factory=deque)
    credit: int = WINDOW
    owed: int = 0
    is_open: bool = False
    ends: bool = False
    over: bool = False

    def __post_init__(self):
        self.sock.setblocking(False)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            self.sock.setsockopt(socket.SOL_SOCKET, option, _BUFFER)

    @property
    def reads(self) -> bool:
        """Return whether data of the worker can be forwarded now."""
        return self.is_open and self.credit > 0 and not self.ends

    def pull(self) -> None:
        """Forward the data that the worker has written to the other end, as far as credit allows."""
        while self.reads and not self.over:
            size = min(PIECE, self.credit)
            frame = room(HEAD.size + size)
            try:
                got = self.sock.recv_into(frame[HEAD.size :])
            except BlockingIOError:
                return
            except OSError:
                got = 0
            if not got:
                self.send(self.peer, pack(END, other(self.key)))
                self.finish()
                return
            HEAD.pack_into(frame, 0, DATA, not self.key[2], self.key[0], self.key[1], 0)
            self.credit -= got
            self.send(self.peer, frame[: HEAD.size + got])
            if got < size // 2:
                return

    def push(self) -> None:
        """Write received data to the worker."""
        while self.out and not self.over:
            piece = self.out[0]
            try:
                taken = self.sock.send(piece)
            except BlockingIOError:
                break
            except OSError:
                self.reset("the worker has hung up")
                return
            self.owed += taken
            if taken < len(piece):
                self.out[0] = piece[taken:]
            else:
                self.out.popleft()
        if self.owed >= WINDOW // 4 or (self.owed and not self.out):
            self.send(self.peer, pack(CREDIT, other(self.key), self.owed))
            self.owed = 0
        if self.ends and not self.out:
            self.finish()

    def take(self, kind: int, number: int, rest: memoryview) -> None:
        """Process a frame for this stream.

        Args:
            number: number in the header: the bytes of a CREDIT.
            rest: bytes after the header: the data, or the reason of a RESET.
        """
        if kind == DATA:
            self.out.append(rest)
            self.push()
        elif kind == CREDIT:
            self.credit += number
            self.pull()
        elif kind == OPENED:
            self.is_open = True
            self.answer(b"+")
        elif kind == END:
            self.ends = True
            self.push()
        elif kind == RESET:
            self.fail(bytes(rest))

    def answer(self, text: bytes) -> None:
        """Send a connecting worker the result of its request: "+", or "-" and the reason."""
        with contextlib.suppress(OSError):
            self.sock.send(text)

    def reset(self, why: str) -> None:
        """Abort the stream on both ends."""
        self.send(self.peer, pack(RESET, other(self.key), rest=why.encode()))
        self.fail(why.encode())

    def fail(self, why: bytes) -> None:
        """Abort the stream on this end only."""
        if not self.is_open and not self.over:
            self.answer(b"-" + why[:200])
        self.finish()

    def finish(self) -> None:
        """Mark the stream as ended, and drop the data that the worker has not accepted."""
        self.over = True
        self.out.clear()
