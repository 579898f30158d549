"""Handshake of a ring connection: mutual authentication by HMAC; the token itself never crosses the wire.

    acceptor: MAGIC, a nonce
    dialer:   MAGIC, number of the quorum, digest of what the ring agrees on, own index, stream, a nonce; proof over all
    acceptor: accepted or why not, the number it is at, whom it blames; proof over the dialer's nonce and this

Before a peer has proved that it knows the run's token, nothing else is accepted from it or sent to it.
"""

import hashlib
import hmac
import json
import secrets
import struct
from dataclasses import dataclass

MAGIC = b"ft-ring1"
NONCE_BYTES = 16
GREETING_BYTES = len(MAGIC) + NONCE_BYTES
_BODY, _VERDICT = struct.Struct("!8sQ16sHH16s"), struct.Struct("!BQh")
_PROOF_BYTES = hashlib.sha256().digest_size
HELLO_BYTES, ANSWER_BYTES = _BODY.size + _PROOF_BYTES, _VERDICT.size + _PROOF_BYTES

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
        agreement: digest of what the ring agrees on.
        sender: its index among the members.
        stream: which connection this is; 0 is the one for control.
        nonce: random bytes that the answer's proof has to cover.
    """

    number: int
    agreement: bytes
    sender: int
    stream: int
    nonce: bytes


def agreement(members: list[str], *options: int) -> bytes:
    """Return a digest of what all members must have in common: addresses and options."""
    return hashlib.sha256(json.dumps([members, options]).encode()).digest()[:16]


def greeting() -> bytes:
    return MAGIC + secrets.token_bytes(NONCE_BYTES)


def is_greeting(said: bytes) -> bool:
    return len(said) == GREETING_BYTES and said.startswith(MAGIC)


def write_hello(hello: Hello, token: str, greeted: bytes) -> bytes:
    body = _BODY.pack(MAGIC, hello.number, hello.agreement, hello.sender, hello.stream, hello.nonce)
    return body + _proof(token, b"hello", greeted, body)


def read_hello(said: bytes, token: str, greeted: bytes) -> Hello | None:
    """Decode a hello; return None if it is not from a member of this run."""
    body, proof = said[: _BODY.size], said[_BODY.size :]
    if len(said) != HELLO_BYTES or not hmac.compare_digest(proof, _proof(token, b"hello", greeted, body)):
        return None
    magic, *fields = _BODY.unpack(body)
    return Hello(*fields) if magic == MAGIC else None


@dataclass(frozen=True)
class Answer:
    """Answer of an acceptor.

    Attributes:
        verdict: TAKEN, or why the connection is refused.
        number: number of the quorum that it is at.
        suspect: index of the member to blame if that quorum was given up, None if unknown.
    """

    verdict: int
    number: int
    suspect: int | None = None


def write_answer(answer: Answer, token: str, nonce: bytes) -> bytes:
    body = _VERDICT.pack(answer.verdict, answer.number, -1 if answer.suspect is None else answer.suspect)
    return body + _proof(token, b"answer", nonce, body)


def read_answer(said: bytes, token: str, nonce: bytes) -> Answer | None:
    """Decode an answer; return None if it is not from a member of this run."""
    body, proof = said[: _VERDICT.size], said[_VERDICT.size :]
    if len(said) != ANSWER_BYTES or not hmac.compare_digest(proof, _proof(token, b"answer", nonce, body)):
        return None
    verdict, number, suspect = _VERDICT.unpack(body)
    return Answer(verdict, number, None if suspect < 0 else suspect)


def _proof(token: str, *said: bytes) -> bytes:
    return hmac.new(token.encode(), b"|".join(said), hashlib.sha256).digest()
