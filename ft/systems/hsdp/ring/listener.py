"""Listening side of FT-HSDP's all-reduce ring: accepts the connections of the left neighbour, and refuses all others.

A ring is connected anew for every quorum, the set of replicas that take part in a training step; quorums are numbered.
A peer that connects first sends a hello message with the quorum that it has joined (:mod:`ft.systems.hsdp.ring.hello`).
A neighbour that has joined a later quorum than this member waits for its answer until this member joins that quorum,
too. The poll loop of the ring's thread handles each new connection a few bytes at a time, so that an unauthenticated or
silent peer blocks nothing.
"""

import contextlib
import socket
import time
from dataclasses import dataclass, field

from ft.net.handshake import Party
from ft.systems.hsdp.ring.control import BREAK, Control, Message
from ft.systems.hsdp.ring.hello import (
    GIVEN_UP,
    HELLO_BYTES,
    OTHER_MEMBERS,
    STALE,
    TAKEN,
    Answer,
    Hello,
    party,
    read_hello,
    write_answer,
)
from ft.systems.hsdp.ring.outcome import Broken
from ft.systems.hsdp.ring.poller import READ, Poller

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
    """The connections that are expected from the left neighbour.

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
