"""The messages in the handshake (:mod:`ft.net.handshake`) of a ring's connections.

    dialer:   number of the quorum, digest of the members and options, own index, number of the stream
    acceptor: accepted, or why not; number of its quorum; index of the member that it suspects

Before a peer has proved that it knows the run's token, nothing else is accepted from it or sent to it.
"""

import hashlib
import json
import struct
from dataclasses import dataclass

from ft.net.handshake import GREETING_BYTES, PROOF_BYTES, NotAMember, Party

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
