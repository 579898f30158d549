"""How the members of FT-HSDP's all-reduce ring connect: the handshake, its two sides, and the options of the sockets.

A ring is connected anew for every quorum; quorums are numbered. Each member dials its right neighbour: a short-lived
thread connects, and the poll loop of the ring's thread runs the handshakes (:mod:`ft.net.handshake`), a few bytes at a
time, so that an unauthenticated or silent peer blocks nothing:

    dialer:   number of the quorum, digest of the members and options, own index, number of the stream
    acceptor: accepted, or why not; number of its quorum; index of the member that it suspects

Before a peer has proved that it knows the run's token, nothing else is accepted from it or sent to it. The connections
of the left neighbour are accepted, and all others refused. A neighbour that has joined a later quorum than this member
waits for its answer until this member joins that quorum, too.
"""

import contextlib
import errno
import hashlib
import json
import socket
import struct
import threading
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

from ft.base.errors import ReplaceNodeError
from ft.net.handshake import GREETING_BYTES, PROOF_BYTES, NotAMember, Party
from ft.net.streams import Network
from ft.systems.hsdp.ring.links import BREAK, READ, Control, Message, Poller
from ft.systems.hsdp.ring.options import Broken, RingOptions

PURPOSE = "ft-ring-2"
_BODY, _VERDICT = struct.Struct("!Q16sHH"), struct.Struct("!BQh")
HELLO_BYTES = GREETING_BYTES + _BODY.size + PROOF_BYTES
ANSWER_BYTES = _VERDICT.size + PROOF_BYTES

TAKEN, STALE, OTHER_MEMBERS, GIVEN_UP = range(4)
WHY = {
    STALE: "is at a later quorum",
    OTHER_MEMBERS: "has other members or other options for the same quorum",
    GIVEN_UP: "has given up this quorum",
}


@dataclass(frozen=True)
class Hello:
    """Message of a dialer.

    Attributes:
        number: number of its quorum.
        agreement: digest of what all members of the ring must have in common.
        sender: its index among the members.
        stream: number of the connection; 0 is the control connection.
    """

    number: int
    agreement: bytes
    sender: int
    stream: int


def agreement(members: list[str], *options: int) -> bytes:
    """Return a digest of what all members must have in common: addresses and options (16 bytes)."""
    return hashlib.sha256(json.dumps([members, options]).encode()).digest()[:16]


def party(token: str, is_dialer: bool) -> Party:
    """Return one end of a handshake of the ring's protocol."""
    return Party(token, PURPOSE, is_dialer)


def write_hello(dialer: Party, theirs: bytes, hello: Hello) -> bytes:
    """Return the dialer's bytes of the handshake. ``theirs``: the acceptor's challenge."""
    body = _BODY.pack(hello.number, hello.agreement, hello.sender, hello.stream)
    return dialer.greeting() + dialer.seal(theirs, body)


def read_hello(acceptor: Party, said: bytes) -> tuple[Hello, bytes] | None:
    """Return a dialer's message and its challenge; None if the dialer is not a member of this run."""
    try:
        theirs = acceptor.read_greeting(said[:GREETING_BYTES])
    except NotAMember:
        return None
    body = acceptor.open(theirs, said[GREETING_BYTES:]) if len(said) == HELLO_BYTES else None
    return None if body is None else (Hello(*_BODY.unpack(body)), theirs)


@dataclass(frozen=True)
class Answer:
    """Answer of an acceptor.

    Attributes:
        verdict: TAKEN, or the reason why the connection is refused.
        number: number of the acceptor's quorum.
        suspect: index of the member that is suspected if that quorum was given up; None if unknown.
    """

    verdict: int
    number: int
    suspect: int | None = None


def write_answer(acceptor: Party, theirs: bytes, answer: Answer) -> bytes:
    """Return the acceptor's bytes of the handshake. ``theirs``: the dialer's challenge."""
    body = _VERDICT.pack(answer.verdict, answer.number, -1 if answer.suspect is None else answer.suspect)
    return acceptor.seal(theirs, body)


def read_answer(dialer: Party, theirs: bytes, said: bytes) -> Answer | None:
    """Return an acceptor's answer; None if the acceptor is not a member of this run."""
    body = dialer.open(theirs, said) if len(said) == ANSWER_BYTES else None
    if body is None:
        return None
    verdict, number, suspect = _VERDICT.unpack(body)
    return Answer(verdict, number, None if suspect < 0 else suspect)


_LOCAL = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EADDRNOTAVAIL)
"""Errors of connecting whose cause is on this node."""


class _Call:
    """One connection during its handshake.

    Attributes:
        theirs: the neighbour's challenge.
        said: bytes received of the present message, which has ``wanted`` bytes.
        is_taken: whether the neighbour has accepted the connection.
    """

    def __init__(self, connection: socket.socket, hello: Hello, token: str):
        self.connection, self.hello = connection, hello
        self.party, self.theirs = party(token, is_dialer=True), b""
        self.said, self.wanted = bytearray(), GREETING_BYTES
        self.is_taken = False


class Dialer:
    """Opens the connections of one quorum to the right neighbour. Used by the driver's thread.

    Args:
        poller: the poll loop that runs the handshakes.
        network: the network that carries the connections.
        address: address of the neighbour.
        index: index of the neighbour among the members.
        hello: message to send in each handshake; its ``stream`` is replaced.
        token: token of the run.
    """

    def __init__(self, poller: Poller, network: Network, address: str, index: int, hello: Hello, token: str):
        self._poller, self._network, self._address = poller, network, address
        self._index, self._hello, self._token = index, hello, token
        self._lock = threading.Lock()
        self._dialled: list[socket.socket | OSError] = []
        self._is_over = False
        self._calls: list[_Call] = []

    def start(self, streams: int, limit_s: float) -> None:
        """Start to dial ``streams`` connections (including the control connection), each within ``limit_s`` seconds."""
        threading.Thread(target=self._dial, args=(streams, limit_s), name="ft-ring-dial", daemon=True).start()

    def tend(self) -> None:
        """Start the handshake on connections that were dialled since the last call.

        Raises:
            Broken: the neighbour cannot be reached.
            ReplaceNodeError: this node cannot connect to any other.
        """
        with self._lock:
            dialled, self._dialled = self._dialled, []
        for connection in dialled:
            if isinstance(connection, OSError):
                raise self._failed(connection)
            connection.setblocking(False)
            call = _Call(connection, replace(self._hello, stream=len(self._calls)), self._token)
            self._calls.append(call)
            self._poller.watch(connection.fileno(), READ, lambda call=call: self._hear(call))

    def taken(self, streams: int) -> list[socket.socket] | None:
        """Return all connections once the neighbour has accepted them, else None. The caller then owns them."""
        if len(self._calls) < streams or not all(call.is_taken for call in self._calls):
            return None
        connections, self._calls = [call.connection for call in self._calls], []
        return connections

    def close(self, why: Broken | None) -> None:
        """Close the connections that were not handed over, and send the neighbour the reason ``why``. The dialing
        thread ends by itself.
        """
        with self._lock:
            self._is_over = True
            dialled, self._dialled = self._dialled, []
        for connection in dialled:
            if not isinstance(connection, OSError):
                connection.close()
        for call in self._calls:
            self._poller.forget(call.connection.fileno())
            if call.is_taken and call.hello.stream == 0 and why is not None:
                Control(call.connection).say(Message(BREAK, suspect=why.suspect, reason=why.reason))
            call.connection.close()
        self._calls = []

    def _dial(self, streams: int, limit_s: float) -> None:
        for _ in range(streams):
            try:
                connection: socket.socket | OSError = self._network.dial(self._address, limit_s)
            except OSError as error:
                connection = error
            with self._lock:
                if self._is_over:
                    if not isinstance(connection, OSError):
                        connection.close()
                    return
                self._dialled.append(connection)
                self._poller.wake()
            if isinstance(connection, OSError):
                return

    def _hear(self, call: _Call) -> None:
        try:
            said = call.connection.recv(call.wanted - len(call.said))
        except BlockingIOError:
            return
        except OSError as error:
            raise self._failed(error) from error
        if not said:
            raise Broken(f"{self._name()} hung up: it is no member of this run, or has just ended", self._index)
        call.said += said
        if call.wanted == GREETING_BYTES and not call.party.may_begin(call.said):
            raise Broken(
                f"{self._name()} does not speak the ring's protocol: another process has that port", self._index
            )
        if len(call.said) < call.wanted:
            return
        if call.wanted == GREETING_BYTES:
            self._introduce(call)
        else:
            self._understand(call)

    def _introduce(self, call: _Call) -> None:
        try:
            call.theirs = call.party.read_greeting(bytes(call.said))
            call.connection.send(write_hello(call.party, call.theirs, call.hello))
        except OSError as error:
            raise self._failed(error) from error
        call.said, call.wanted = bytearray(), ANSWER_BYTES

    def _understand(self, call: _Call) -> None:
        answer = read_answer(call.party, call.theirs, bytes(call.said))
        if answer is None:
            raise Broken(f"{self._name()} is no member of this run", self._index)
        if answer.verdict != TAKEN:
            why = f"{self._name()} {WHY.get(answer.verdict, 'refuses')}; its quorum is {answer.number}"
            raise Broken(why, answer.suspect)
        self._poller.forget(call.connection.fileno())
        call.is_taken = True

    def _failed(self, error: OSError) -> Exception:
        if error.errno in _LOCAL:
            return ReplaceNodeError(f"no connection to {self._name()}: {error.strerror}")
        return Broken(f"{self._name()} cannot be reached: {error.strerror or error}", self._index)

    def _name(self) -> str:
        return f"the right neighbour, member {self._index} at {self._address},"


_HELLO_S, _MAX_NEWCOMERS = 5.0, 64
_PAUSE_S = 0.2
"""Pause of accepting after the process has run out of file descriptors, in seconds."""


@dataclass
class _Newcomer:
    """A connection that was accepted by the operating system but not by this member yet.

    Attributes:
        connection: the connection.
        party: this side of the handshake.
        since: time of the connection, in seconds of the monotonic clock.
        said: bytes received so far.
        hello: the hello message of the peer; None until it is complete and authenticated.
        theirs: challenge of the peer, which the answer has to prove.
    """

    connection: socket.socket
    party: Party
    since: float
    said: bytearray = field(default_factory=bytearray)
    hello: Hello | None = None
    theirs: bytes = b""


@dataclass(frozen=True)
class Expected:
    """What a member of a ring expects of the connections that its left neighbour opens to it.

    Attributes:
        number: number of the quorum.
        agreement: digest of the addresses and options that all members must have in common.
        sender: index of the left neighbour among the members.
        streams: number of connections, including the one for control messages.
    """

    number: int
    agreement: bytes
    sender: int
    streams: int


class Listener:
    """Accepts the connections of the left neighbour; used by the driver's thread.

    Args:
        poller: poller of the ring's thread.
        listener: listening socket.
        token: secret shared by the processes of the run.

    Attributes:
        taken: accepted connections of the left neighbour, by their number; code that removes one has to close it.
    """

    def __init__(self, poller: Poller, listener: socket.socket, token: str):
        self._poller, self._listener, self._token = poller, listener, token
        self._newcomers: list[_Newcomer] = []
        self._expected: Expected | None = None
        self._given_up: Answer | None = None
        self._paused_until: float | None = None
        self.taken: dict[int, socket.socket] = {}
        listener.setblocking(False)
        poller.watch(listener.fileno(), READ, self._accept)

    def expect(self, expected: Expected) -> None:
        """Expect the connections of a quorum from now on, and answer peers that wait already."""
        self._drop_taken()
        self._expected, self._given_up = expected, None
        self._judge_all()

    def give_up(self, number: int, why: Broken) -> None:
        """Answer peers that connect or have connected for quorum ``number`` that this member has given it up.

        The answer names the member that seems to be the cause.
        """
        if 0 in self.taken:
            Control(self.taken[0]).say(Message(BREAK, suspect=why.suspect, reason=why.reason))
        self._drop_taken()
        self._expected, self._given_up = None, Answer(GIVEN_UP, number, why.suspect)
        self._judge_all()

    def tend(self) -> None:
        """Drop peers whose handshake takes too long, and resume accepting after a pause. Must be called regularly."""
        now = time.monotonic()
        for each in [each for each in self._newcomers if each.hello is None and now - each.since > _HELLO_S]:
            self._drop(each)
        if self._paused_until is not None and now > self._paused_until:
            self._paused_until = None
            self._poller.watch(self._listener.fileno(), READ, self._accept)

    def close(self) -> None:
        self._drop_taken()
        for each in list(self._newcomers):
            self._drop(each)
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
        if len(self._newcomers) >= _MAX_NEWCOMERS:
            self._drop(next((each for each in self._newcomers if each.hello is None), self._newcomers[0]))
        connection.setblocking(False)
        newcomer = _Newcomer(connection, party(self._token, is_dialer=False), time.monotonic())
        self._newcomers.append(newcomer)
        self._poller.watch(connection.fileno(), READ, lambda: self._hear(newcomer))
        self._say(newcomer, newcomer.party.greeting())

    def _hear(self, newcomer: _Newcomer) -> None:
        try:
            said = newcomer.connection.recv(HELLO_BYTES)
        except BlockingIOError:
            return
        except OSError:
            said = b""
        newcomer.said += said
        if not said or len(newcomer.said) > HELLO_BYTES:
            self._drop(newcomer)
        elif len(newcomer.said) == HELLO_BYTES:
            heard = read_hello(newcomer.party, bytes(newcomer.said))
            if heard is not None:
                newcomer.hello, newcomer.theirs = heard
            self._judge(newcomer)

    def _judge_all(self) -> None:
        for each in [each for each in self._newcomers if each.hello is not None]:
            self._judge(each)

    def _judge(self, newcomer: _Newcomer) -> None:
        hello, expected, given_up = newcomer.hello, self._expected, self._given_up
        if hello is None:
            self._drop(newcomer)
        elif given_up and hello.number <= given_up.number:
            self._refuse(newcomer, given_up)
        elif expected is None or hello.number > expected.number:
            return  # the peer waits until this member joins that quorum
        elif hello.number < expected.number:
            self._refuse(newcomer, Answer(STALE, expected.number))
        elif (hello.agreement, hello.sender) != (expected.agreement, expected.sender):
            self._refuse(newcomer, Answer(OTHER_MEMBERS, expected.number))
        elif hello.stream in self.taken or hello.stream >= expected.streams:
            self._drop(newcomer)
        else:
            self._say(newcomer, write_answer(newcomer.party, newcomer.theirs, Answer(TAKEN, expected.number)))
            self._forget(newcomer)
            self.taken[hello.stream] = newcomer.connection

    def _refuse(self, newcomer: _Newcomer, answer: Answer) -> None:
        self._say(newcomer, write_answer(newcomer.party, newcomer.theirs, answer))
        self._drop(newcomer)

    def _say(self, newcomer: _Newcomer, what: bytes) -> None:
        with contextlib.suppress(OSError):  # the peer is gone, which the next read will show
            newcomer.connection.send(what)

    def _forget(self, newcomer: _Newcomer) -> None:
        self._poller.forget(newcomer.connection.fileno())
        self._newcomers.remove(newcomer)

    def _drop(self, newcomer: _Newcomer) -> None:
        self._forget(newcomer)
        newcomer.connection.close()

    def _drop_taken(self) -> None:
        for connection in self.taken.values():
            connection.close()
        self.taken = {}


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
