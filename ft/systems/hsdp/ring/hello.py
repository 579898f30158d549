"""What is said when a connection of a ring is made: the handshake of :mod:`ft.net.handshake` with these messages.

    dialer:   number of the quorum, what the ring agrees on, own index, which stream
    acceptor: taken or why not, the number it is at, whom it blames

Nothing is taken from, or sent to, who has not proved to know the run's token.
"""

import hashlib
import json
import struct
from dataclasses import dataclass

from ft.net.handshake import GREETING_BYTES, PROOF_BYTES, Party, Stranger

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
    """What a dialer says: its quorum, a digest of what the ring agrees on, its index, the stream (0: for control)."""

    number: int
    agreement: bytes
    sender: int
    stream: int


def agreement(members: list[str], *options: int) -> bytes:
    """A digest of what all members must have in common."""
    return hashlib.sha256(json.dumps([members, options]).encode()).digest()[:16]


def party(token: str, is_dialer: bool) -> Party:
    return Party(token, PURPOSE, is_dialer)


def write_hello(dialer: Party, theirs: bytes, hello: Hello) -> bytes:
    """The dialer's part; ``theirs``: the acceptor's challenge."""
    body = _BODY.pack(hello.number, hello.agreement, hello.sender, hello.stream)
    return dialer.greeting() + dialer.seal(theirs, body)


def read_hello(acceptor: Party, said: bytes) -> tuple[Hello, bytes] | None:
    """What a dialer has said, and its challenge. None: that was no member of this run."""
    try:
        theirs = acceptor.read_greeting(said[:GREETING_BYTES])
    except Stranger:
        return None
    body = acceptor.open(theirs, said[GREETING_BYTES:]) if len(said) == HELLO_BYTES else None
    return None if body is None else (Hello(*_BODY.unpack(body)), theirs)


@dataclass(frozen=True)
class Answer:
    """What an acceptor says: TAKEN or why not, the quorum it is at, who is to blame if that one was given up."""

    verdict: int
    number: int
    suspect: int | None = None


def write_answer(acceptor: Party, theirs: bytes, answer: Answer) -> bytes:
    """The acceptor's part; ``theirs``: the dialer's challenge."""
    body = _VERDICT.pack(answer.verdict, answer.number, -1 if answer.suspect is None else answer.suspect)
    return acceptor.seal(theirs, body)


def read_answer(dialer: Party, theirs: bytes, said: bytes) -> Answer | None:
    """None: that was no member of this run."""
    body = dialer.open(theirs, said) if len(said) == ANSWER_BYTES else None
    if body is None:
        return None
    verdict, number, suspect = _VERDICT.unpack(body)
    return Answer(verdict, number, None if suspect < 0 else suspect)
