"""The challenge-response handshake that starts every connection between the processes of a run.

Each end proves that it knows the run's token. The token itself never crosses the wire::

    acceptor: label | challenge
    dialer:   label | challenge | message | proof
    acceptor: message | proof                        or zeros, if the dialer has another token

The label names the protocol and its version. A challenge is a random number that is used once. A proof is an
HMAC-SHA256, keyed with the token, of the protocol, the role of the end that computes it, both challenges and the
message. Therefore a proof is of no use on another connection, in the other direction, or for another protocol. Messages
have a fixed size, which the protocol defines.

There are two ways to use the handshake. ``dial`` and ``accept`` run all of it over a blocking socket. A protocol with
its own framing or event loop exchanges challenges and proofs itself, and computes them with ``Party``.
"""

import hashlib
import hmac
import secrets
import socket
import struct
import time
from dataclasses import dataclass, field
from typing import ClassVar

from ft.base.errors import FtError

CHALLENGE_BYTES = 16
PROOF_BYTES = hashlib.sha256().digest_size
_LABEL_BYTES = 16
GREETING_BYTES = _LABEL_BYTES + CHALLENGE_BYTES
_SCHEME, _ROLES = "ft-handshake-1", ("acceptor", "dialer")
_LENGTH = struct.Struct("<Q")


class HandshakeRefused(FtError):
    """One end does not know the token that the other end's run uses."""

    def __init__(self) -> None:
        super().__init__("the token is not that of this run")


class NotAMember(ConnectionError):
    """The other end is not a member of a run: it uses another protocol, or gives no proof."""


def is_equal(given: bytes, expected: bytes) -> bool:
    """Compare two proofs in a time that does not depend on where they differ."""
    return hmac.compare_digest(given, expected)


@dataclass(frozen=True)
class Party:
    """One end of one connection.

    Args:
        purpose: name and version of the protocol; at most 16 ASCII characters.
        is_dialer: whether this end opened the connection.

    Attributes:
        challenge: random bytes that the other end must cover in its proof; new for each connection.
    """

    REFUSAL: ClassVar[bytes] = bytes(PROOF_BYTES)

    token: str = field(repr=False)
    purpose: str
    is_dialer: bool
    challenge: bytes = field(default_factory=lambda: secrets.token_bytes(CHALLENGE_BYTES))

    @property
    def label(self) -> bytes:
        return self.purpose.encode().ljust(_LABEL_BYTES, b"\0")

    def greeting(self) -> bytes:
        return self.label + self.challenge

    def may_begin(self, data: bytes) -> bool:
        """Return whether ``data``, the first bytes from the other end, can start a greeting of this protocol."""
        return data[:_LABEL_BYTES] == self.label[: len(data)]

    def read_greeting(self, data: bytes) -> bytes:
        """Return the challenge in a greeting.

        Raises:
            NotAMember: ``data`` is not a greeting of this protocol.
        """
        if len(data) != GREETING_BYTES or not self.may_begin(data):
            raise NotAMember(f"the other end begins with {data[:_LABEL_BYTES]!r} instead of {self.purpose!r}")
        return data[_LABEL_BYTES:]

    def key(self, theirs: bytes) -> bytes:
        """Return a key that only the two ends of this connection know. ``theirs``: the other end's challenge."""
        challenges = (self.challenge, theirs) if self.is_dialer else (theirs, self.challenge)
        return self._hmac("key", *challenges)

    def seal(self, theirs: bytes, message: bytes = b"") -> bytes:
        """Return ``message`` followed by this end's proof. ``theirs``: the other end's challenge."""
        return message + self._hmac(_ROLES[self.is_dialer], theirs, self.challenge, message)

    def open(self, theirs: bytes, sealed: bytes) -> bytes | None:
        """Return the message that the other end has sealed; None if its proof is wrong."""
        message, given = sealed[:-PROOF_BYTES], sealed[-PROOF_BYTES:]
        expected = self._hmac(_ROLES[not self.is_dialer], self.challenge, theirs, message)
        return message if is_equal(given, expected) else None

    def _hmac(self, *words: bytes | str) -> bytes:
        """Return the HMAC of the protocol and of ``words``, which only a process that knows the token can compute.

        The lengths of the words are included: ("ab", "c") and ("a", "bc") have different ones.
        """
        digest = hmac.new(self.token.encode(), digestmod=hashlib.sha256)
        for word in (_SCHEME, self.purpose, *words):
            data = word.encode() if isinstance(word, str) else word
            digest.update(_LENGTH.pack(len(data)))
            digest.update(data)
        return digest.digest()


def dial(
    connection: socket.socket,
    party: Party,
    limit_s: float,
    message: bytes = b"",
    reply_bytes: int = 0,
) -> tuple[bytes, bytes]:
    """Run the dialer's part of the handshake.

    Args:
        connection: a new connection; its timeout is restored afterwards.

    Returns:
        The acceptor's challenge and its message.

    Raises:
        HandshakeRefused: the acceptor belongs to another run.
        NotAMember: the acceptor belongs to no run.
        OSError: the connection is lost; TimeoutError if the time is up.
    """
    with _Deadline(connection, limit_s) as stream:
        theirs = stream.take_greeting(party)
        stream.send(party.greeting() + party.seal(theirs, message))
        sealed = stream.take(reply_bytes + PROOF_BYTES)
    if sealed.endswith(party.REFUSAL):
        raise HandshakeRefused
    reply = party.open(theirs, sealed)
    if reply is None:
        raise NotAMember("the other end does not prove that it is a member of this run")
    return theirs, reply


def accept(
    connection: socket.socket,
    party: Party,
    limit_s: float,
    message_bytes: int = 0,
    reply_bytes: int = 0,
) -> tuple[bytes, bytes]:
    """Run the acceptor's part of the handshake, except for its last message: the caller sends
    ``party.seal(theirs, reply)``.

    Args:
        connection: a new accepted connection; its timeout is restored afterwards.
        reply_bytes: size of the reply. A dialer with another token gets that many zeros, and zeros as the proof.

    Returns:
        The dialer's challenge (``theirs``) and its message.

    Raises:
        HandshakeRefused: the dialer does not prove that it belongs to this run.
        NotAMember: the dialer uses another protocol.
        OSError: the connection is lost; TimeoutError if the time is up.
    """
    with _Deadline(connection, limit_s) as stream:
        stream.send(party.greeting())
        theirs = stream.take_greeting(party)
        message = party.open(theirs, stream.take(message_bytes + PROOF_BYTES))
        if message is None:
            stream.send(bytes(reply_bytes) + party.REFUSAL)
            raise HandshakeRefused
    return theirs, message


class _Deadline:
    """Blocking reads and writes on a connection that share one deadline."""

    def __init__(self, connection: socket.socket, limit_s: float):
        self._connection, self._until = connection, time.monotonic() + limit_s

    def __enter__(self) -> "_Deadline":
        self._before = self._connection.gettimeout()
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.settimeout(self._before)

    def send(self, data: bytes) -> None:
        self._hurry()
        self._connection.sendall(data)

    def take_greeting(self, party: Party) -> bytes:
        """Return the challenge in the other end's greeting; raise NotAMember at the first byte that does not fit."""
        data = b""
        while party.may_begin(data) and len(data) < GREETING_BYTES:
            data += self._take(GREETING_BYTES - len(data))
        return party.read_greeting(data)

    def take(self, length: int) -> bytes:
        data = b""
        while len(data) < length:
            data += self._take(length - len(data))
        return data

    def _take(self, most: int) -> bytes:
        self._hurry()
        piece = self._connection.recv(most)
        if not piece:
            raise ConnectionError("the other end has closed the connection")
        return piece

    def _hurry(self) -> None:
        left = self._until - time.monotonic()
        if left <= 0:
            raise TimeoutError("the handshake is not done in time")
        self._connection.settimeout(left)
