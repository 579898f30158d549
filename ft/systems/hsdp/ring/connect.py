"""How the members of FT-HSDP's all-reduce ring connect: the handshake, its two sides, and the options of the sockets.

A ring is connected anew for every quorum; quorums are numbered. Each member dials its right neighbour, with a
connection for control messages and one or more for data. Handshakes (:mod:`ft.net.handshake`) are done in short-lived
threads, so that an unauthenticated or silent peer blocks nothing:

    dialer:   number of the quorum, digest of the members and options, own index, number of the stream
    acceptor: accepted, or why not; number of its quorum; index of the member that it suspects

The connections of the left neighbour are accepted, and all others refused. A neighbour that has joined a later quorum
than this member waits for its answer until this member joins that quorum, too.
"""

import contextlib
import errno
import hashlib
import json
import socket
import struct
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ft.base.errors import ReplaceNodeError
from ft.net.handshake import HandshakeRefused, NotAMember, Party, accept, dial
from ft.net.streams import Network
from ft.systems.hsdp.ring.links import BREAK, READ, Control, ControlMessage, Poller
from ft.systems.hsdp.ring.options import Broken, RingOptions

PURPOSE = "ft-ring-2"
HELLO, ANSWER = struct.Struct("!Q16sHH"), struct.Struct("!BQh")
NOBODY = -1

TAKEN, STALE, OTHER_MEMBERS, GIVEN_UP = range(4)
WHY = {
    STALE: "is at a later quorum",
    OTHER_MEMBERS: "has other members or other options for the same quorum",
    GIVEN_UP: "has given up this quorum",
}


class Hello(NamedTuple):
    """Message of a dialer.

    Attributes:
        agreement: digest of what all members of the ring must have in common.
        stream: number of the connection; 0 is the control connection.
    """

    number: int
    agreement: bytes
    sender: int
    stream: int


class Acceptance(NamedTuple):
    """Answer of an acceptor.

    Attributes:
        verdict: TAKEN, or the reason why the connection is refused.
        number: number of the acceptor's quorum.
        suspect: index of the member that is suspected if that quorum was given up; NOBODY if unknown.
    """

    verdict: int
    number: int
    suspect: int = NOBODY


def agreement(members: list[str], *options: int) -> bytes:
    """Return a digest of what all members must have in common: addresses and options (16 bytes)."""
    return hashlib.sha256(json.dumps([members, options]).encode()).digest()[:16]


_LOCAL = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EADDRNOTAVAIL)
"""Errors of connecting whose cause is on this node."""


class Dialer:
    """Opens the connections of one quorum to the right neighbour, in a thread of its own.

    Args:
        poller: the poll loop of the ring's thread, which is woken for every connection and for a failure.
    """

    def __init__(self, poller: Poller, network: Network, address: str, index: int, token: str):
        self._poller, self._network, self._address, self._index = poller, network, address, index
        self._token = token
        self._lock = threading.Lock()
        self._is_over = False
        self._taken: list[socket.socket] = []
        self._dialled: socket.socket | None = None
        self._failure: Exception | None = None

    def start(self, hello: Hello, streams: int, limit_s: float) -> None:
        """Start to open ``streams`` connections, each within ``limit_s`` seconds, with ``hello`` for the first one."""
        threading.Thread(target=self._dial, args=(hello, streams, limit_s), name="ft-ring-dial", daemon=True).start()

    def taken(self, streams: int) -> list[socket.socket] | None:
        """Return all connections once the neighbour has accepted them, else None. The caller then owns them.

        Raises:
            Broken: the neighbour cannot be reached, or refuses.
            ReplaceNodeError: this node cannot connect to any other.
        """
        with self._lock:
            if self._failure is not None:
                raise self._failure
            if len(self._taken) < streams:
                return None
            taken, self._taken = self._taken, []
            return taken

    def close(self, why: Broken | None) -> None:
        """Close the connections that were not handed over, and send the neighbour the reason ``why``."""
        with self._lock:
            self._is_over = True
            if self._dialled is not None:
                _end(self._dialled)
        if self._taken and why is not None:
            Control(self._taken[0]).say(_broken(why))
        for connection in self._taken:
            connection.close()

    def _dial(self, hello: Hello, streams: int, limit_s: float) -> None:
        for stream in range(streams):
            try:
                connection = self._network.dial(self._address, limit_s)
            except OSError as error:
                self._fail(error)
                return
            with self._lock:
                self._dialled = connection
                is_over = self._is_over
            if is_over or not self._introduce(connection, hello._replace(stream=stream), limit_s):
                with self._lock:
                    self._dialled = None
                connection.close()
                return

    def _introduce(self, connection: socket.socket, hello: Hello, limit_s: float) -> bool:
        """Do the handshake; return whether the neighbour has accepted the connection."""
        try:
            said = HELLO.pack(*hello)
            _, answered = dial(connection, Party(self._token, PURPOSE, True), limit_s, said, ANSWER.size)
        except TimeoutError:
            return False  # the member that waits for this neighbour says so
        except (OSError, HandshakeRefused) as error:
            self._fail(error)
            return False
        answer = Acceptance(*ANSWER.unpack(answered))
        if answer.verdict != TAKEN:
            why = f"{self._name()} {WHY.get(answer.verdict, 'refuses')}; its quorum is {answer.number}"
            self._fail(Broken(why, None if answer.suspect == NOBODY else answer.suspect))
            return False
        connection.setblocking(False)
        with self._lock:
            self._dialled = None
            if not self._is_over:
                self._taken.append(connection)
                self._poller.wake()
            return not self._is_over

    def _fail(self, error: Exception) -> None:
        with self._lock:
            if not self._is_over:
                self._failure = self._in_words(error)
                self._poller.wake()

    def _in_words(self, error: Exception) -> Exception:
        if isinstance(error, Broken):
            return error
        if isinstance(error, HandshakeRefused):
            return Broken(f"{self._name()} is no member of this run", self._index)
        if isinstance(error, NotAMember):
            how = "does not speak the ring's protocol: another process has that port"
        elif isinstance(error, ConnectionError) and error.errno is None:
            how = "hung up: it is no member of this run, or has just ended"
        else:
            code, said = getattr(error, "errno", None), getattr(error, "strerror", None) or error
            if code in _LOCAL:
                return ReplaceNodeError(f"no connection to {self._name()}: {said}")
            how = f"cannot be reached: {said}"
        return Broken(f"{self._name()} {how}", self._index)

    def _name(self) -> str:
        return f"the right neighbour, member {self._index} at {self._address},"


_HELLO_S, _MAX_NEWCOMERS = 5.0, 64
_PAUSE_S = 0.2
"""Pause of accepting after the process has run out of file descriptors, in seconds."""


@dataclass
class _Newcomer:
    """A connection whose other end is a member of this run, and that this member has not answered yet."""

    connection: socket.socket
    party: Party
    theirs: bytes
    hello: Hello


class RingListener:
    """Accepts the connections of the left neighbour; used by the ring's thread.

    Attributes:
        taken: accepted connections of the left neighbour, by their number; code that removes one has to close it.
    """

    def __init__(self, poller: Poller, listener: socket.socket, token: str):
        self._poller, self._listener, self._token = poller, listener, token
        self._lock = threading.Lock()
        self._strangers: list[socket.socket] = []  # connections during their handshakes
        self._greeted: list[_Newcomer] = []  # connections whose handshakes were done since the last call
        self._waiting: list[_Newcomer] = []
        self._is_closed = False
        self._expected: Hello | None = None
        self._streams = 0
        self._given_up: Acceptance | None = None
        self._paused_until: float | None = None
        self.taken: dict[int, socket.socket] = {}
        listener.setblocking(False)
        poller.watch(listener.fileno(), READ, self._accept)

    def expect(self, hello: Hello, streams: int) -> None:
        """Expect ``streams`` connections whose first one says ``hello``, and answer peers that wait already."""
        self._drop_taken()
        self._expected, self._streams, self._given_up = hello, streams, None
        self._judge_all()

    def give_up(self, number: int, why: Broken) -> None:
        """Answer peers that connect or have connected for quorum ``number`` that this member has given it up.

        The answer names the member that seems to be the cause.
        """
        if 0 in self.taken:
            Control(self.taken[0]).say(_broken(why))
        self._drop_taken()
        suspect = NOBODY if why.suspect is None else why.suspect
        self._expected, self._given_up = None, Acceptance(GIVEN_UP, number, suspect)
        self._judge_all()

    def tend(self) -> None:
        """Answer peers whose handshakes are done, and resume accepting after a pause. Must be called regularly."""
        with self._lock:
            greeted, self._greeted = self._greeted, []
        if greeted:
            self._waiting += greeted
            self._judge_all()
        if self._paused_until is not None and time.monotonic() > self._paused_until:
            self._paused_until = None
            self._poller.watch(self._listener.fileno(), READ, self._accept)

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            for connection in self._strangers:
                _end(connection)
        self._drop_taken()
        for newcomer in (*self._greeted, *self._waiting):
            newcomer.connection.close()
        self._poller.forget(self._listener.fileno())
        self._listener.close()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError:  # out of file descriptors: accept again later, when some may have been closed
            self._paused_until = time.monotonic() + _PAUSE_S
            self._poller.forget(self._listener.fileno())
            return
        with self._lock:
            self._strangers.append(connection)
            if len(self._strangers) > _MAX_NEWCOMERS:
                _end(self._strangers[0])
        if len(self._waiting) > _MAX_NEWCOMERS:
            self._waiting.pop(0).connection.close()
        try:
            threading.Thread(target=self._greet, args=(connection,), name="ft-ring-greet", daemon=True).start()
        except RuntimeError:  # no thread can be started now; the peer finds its connection closed
            self._dismiss(connection)

    def _greet(self, connection: socket.socket) -> None:
        """Do the handshake up to the answer, which the ring's thread gives."""
        party = Party(self._token, PURPOSE, False)
        try:
            theirs, said = accept(connection, party, _HELLO_S, HELLO.size, ANSWER.size)
        except (OSError, HandshakeRefused):
            self._dismiss(connection)
            return
        connection.setblocking(False)
        with self._lock:
            self._strangers.remove(connection)
            if self._is_closed:
                connection.close()
                return
            self._greeted.append(_Newcomer(connection, party, theirs, Hello(*HELLO.unpack(said))))
            self._poller.wake()

    def _dismiss(self, connection: socket.socket) -> None:
        with self._lock:
            self._strangers.remove(connection)
        connection.close()

    def _judge_all(self) -> None:
        self._waiting = [newcomer for newcomer in self._waiting if not self._judge(newcomer)]

    def _judge(self, newcomer: _Newcomer) -> bool:
        """Answer a peer; return False if it has to wait until this member joins its quorum."""
        hello, expected, given_up = newcomer.hello, self._expected, self._given_up
        if given_up and hello.number <= given_up.number:
            answer = given_up
        elif expected is None or hello.number > expected.number:
            return False
        elif hello.number < expected.number:
            answer = Acceptance(STALE, expected.number)
        elif (hello.agreement, hello.sender) != (expected.agreement, expected.sender):
            answer = Acceptance(OTHER_MEMBERS, expected.number)
        elif hello.stream in self.taken or hello.stream >= self._streams:
            newcomer.connection.close()
            return True
        else:
            answer = Acceptance(TAKEN, expected.number)
        with contextlib.suppress(OSError):  # the peer is gone, which the next read will show
            newcomer.connection.send(newcomer.party.seal(newcomer.theirs, ANSWER.pack(*answer)))
        if answer.verdict == TAKEN:
            self.taken[hello.stream] = newcomer.connection
        else:
            newcomer.connection.close()
        return True

    def _drop_taken(self) -> None:
        for connection in self.taken.values():
            connection.close()
        self.taken = {}


def _end(connection: socket.socket) -> None:
    """End a connection that another thread uses, which then closes it."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _broken(why: Broken) -> ControlMessage:
    return ControlMessage(BREAK, suspect=why.suspect, reason=why.reason)


_SETTINGS = Path("/proc/sys/net")


def tuned(connections: list[socket.socket], options: RingOptions) -> list[socket.socket]:
    """Set the socket options of the connections to one neighbour, and return the connections.

    The first connection, for control messages, gets no bound. Only TCP connections are tuned; other transports bound
    the bytes in flight themselves.
    """
    bound = send_buffer(options.chunk_bytes * options.chunks // options.streams, *_limits())
    for place, connection in enumerate(connections):
        if connection.family == socket.AF_UNIX:
            continue
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if place and bound:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, bound)
    return connections


def send_buffer(in_flight: int, asked_at_most: int, grown_at_most: int) -> int | None:
    """Return the send buffer to request so that at most ``in_flight`` bytes are unacknowledged; None: request none.

    A buffer of requested size does not grow any more. If the process may not request as much as the bound allows, the
    smaller buffer would cost bandwidth over long distances. So no buffer is requested if the process may not, and
    automatic growth cannot exceed the bound anyway.

    Args:
        in_flight: bound on the unacknowledged bytes.
        asked_at_most: bytes that a process may request (Linux reserves twice as much, for its own needs).
        grown_at_most: bytes up to which Linux lets a buffer grow that was not requested.
    """
    if in_flight // 2 > asked_at_most and grown_at_most <= in_flight:
        return None
    return in_flight // 2


def _limits() -> tuple[int, int]:
    with contextlib.suppress(OSError, ValueError, IndexError):
        grown = int((_SETTINGS / "ipv4/tcp_wmem").read_text().split()[2])
        return int((_SETTINGS / "core/wmem_max").read_text()), grown
    return 0, 1 << 62
