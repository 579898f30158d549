"""The handshake with which connections between the processes of a run begin.

Each end proves that it knows the run's token. The token itself never crosses the wire::

    acceptor: label | challenge
    dialer:   label | challenge | message | proof
    acceptor: message | proof                        or zeros: the dialer has another token

The label names the protocol and its version. A challenge is a random number that is used once. A proof is an
HMAC-SHA256, keyed with the token, of the protocol, the role of the end that gives it, both challenges and the message.
Therefore a proof is of no use on another connection, in the other direction, or for another protocol. Messages have
a fixed size, which the protocol defines.

Two ways to use it: ``dial`` and ``accept`` do all of it over a blocking socket; a protocol with its own framing or its
own event loop exchanges challenges and proofs itself, and computes them with ``Party``.
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
_SCHEME = "ft-handshake-1"
_LENGTH = struct.Struct("<Q")


class Refused(FtError):
    """One end does not know the token of the other end's run."""

    def __init__(self) -> None:
        super().__init__("the token is not that of this run")


class Stranger(ConnectionError):
    """The other end is no member of a run: it talks another protocol, or gives no proof."""


def proof(token: str, *words: bytes | str | int) -> bytes:
    """Returns the HMAC of ``words``, which only a process that knows the token can compute.

    The lengths of the words count: ("ab", "c") and ("a", "bc") have different proofs.
    """
    digest = hmac.new(token.encode(), digestmod=hashlib.sha256)
    for word in words:
        data = word if isinstance(word, bytes) else str(word).encode()
        digest.update(_LENGTH.pack(len(data)))
        digest.update(data)
    return digest.digest()


def is_equal(given: bytes, expected: bytes) -> bool:
    """Compares two proofs in a time that does not depend on where they differ."""
    return hmac.compare_digest(given, expected)


def challenge() -> bytes:
    return secrets.token_bytes(CHALLENGE_BYTES)


def parse_challenge(text: object) -> bytes | None:
    """Returns the challenge that ``text`` is the hexadecimal form of, or None when it is none."""
    try:
        data = bytes.fromhex(text) if isinstance(text, str) else b""
    except ValueError:
        return None
    return data if len(data) == CHALLENGE_BYTES else None


@dataclass(frozen=True)
class Party:
    """One end of one connection.

    Args:
        token: the run's token.
        purpose: name and version of the protocol; at most 16 ASCII characters.
        is_dialer: whether this end made the connection.

    Attributes:
        challenge: what the other end must answer; a new one for each connection.
    """

    REFUSAL: ClassVar[bytes] = bytes(PROOF_BYTES)

    token: str = field(repr=False)
    purpose: str
    is_dialer: bool
    challenge: bytes = field(default_factory=challenge)

    @property
    def label(self) -> bytes:
        return self.purpose.encode().ljust(_LABEL_BYTES, b"\0")

    def answer(self, theirs: bytes, *said: bytes | str | int) -> bytes:
        """Returns this end's proof.

        Args:
            theirs: the other end's challenge.
            said: what this end says with it; the other end checks the proof against the same words.

        Raises:
            ValueError: ``theirs`` is no challenge.
        """
        if len(theirs) != CHALLENGE_BYTES:
            raise ValueError(f"a challenge of {len(theirs)} bytes; it has {CHALLENGE_BYTES}")
        return self._prove(self.is_dialer, theirs, self.challenge, said)

    def check(self, given: bytes, theirs: bytes, *said: bytes | str | int) -> bool:
        """Tells whether ``given`` is the other end's proof.

        Args:
            given: what the other end calls its proof.
            theirs: the other end's challenge.
            said: what the other end says with it.
        """
        expected = self._prove(not self.is_dialer, self.challenge, theirs, said)
        return len(theirs) == CHALLENGE_BYTES and is_equal(given, expected)

    def greeting(self) -> bytes:
        return self.label + self.challenge

    def may_begin(self, data: bytes) -> bool:
        """Tells whether the other end can belong to this protocol, by the first bytes that it has sent."""
        return data[:_LABEL_BYTES] == self.label[: len(data)]

    def read_greeting(self, data: bytes) -> bytes:
        """Returns the challenge in a greeting.

        Raises:
            Stranger: it is no greeting of this protocol.
        """
        if len(data) != GREETING_BYTES or not self.may_begin(data):
            raise Stranger(f"the other end begins with {data[:_LABEL_BYTES]!r} instead of {self.purpose!r}")
        return data[_LABEL_BYTES:]

    def seal(self, theirs: bytes, message: bytes = b"") -> bytes:
        """Returns ``message`` and behind it this end's proof."""
        return message + self.answer(theirs, message)

    def open(self, theirs: bytes, sealed: bytes) -> bytes | None:
        """Returns the message that the other end has sealed, or None when its proof is wrong."""
        message, given = sealed[:-PROOF_BYTES], sealed[-PROOF_BYTES:]
        return message if self.check(given, theirs, message) else None

    def _prove(self, is_dialer: bool, asked: bytes, own: bytes, said: tuple[bytes | str | int, ...]) -> bytes:
        return proof(self.token, _SCHEME, self.purpose, "dialer" if is_dialer else "acceptor", asked, own, *said)


def dial(
    connection: socket.socket,
    party: Party,
    limit_s: float,
    message: bytes = b"",
    reply_bytes: int = 0,
) -> bytes:
    """Does the dialer's part.

    Args:
        connection: just made; its timeout is as before afterwards.
        party: the dialer.
        limit_s: for all of the handshake.
        message: what is said to the acceptor.
        reply_bytes: size of the acceptor's message.

    Returns:
        The acceptor's message.

    Raises:
        Refused: the acceptor belongs to another run.
        Stranger: the acceptor belongs to no run.
        OSError: the connection is lost; TimeoutError when the time is up.
    """
    with _Deadline(connection, limit_s) as stream:
        theirs = stream.take_greeting(party)
        stream.send(party.greeting() + party.seal(theirs, message))
        sealed = stream.take(reply_bytes + PROOF_BYTES)
    if sealed.endswith(party.REFUSAL):
        raise Refused
    reply = party.open(theirs, sealed)
    if reply is None:
        raise Stranger("the other end does not prove that it is a member of this run")
    return reply


def accept(
    connection: socket.socket,
    party: Party,
    limit_s: float,
    message_bytes: int = 0,
    reply_bytes: int = 0,
) -> tuple[bytes, bytes]:
    """Does the acceptor's part, except for its last message: the caller sends ``party.seal(theirs, reply)``.

    Args:
        connection: just accepted; its timeout is as before afterwards.
        party: the acceptor.
        limit_s: for all of the handshake.
        message_bytes: size of the dialer's message.
        reply_bytes: size of the reply, zeros of which tell a dialer with another token that it is refused.

    Returns:
        The dialer's challenge (``theirs``) and its message.

    Raises:
        Refused: the dialer gives no proof that it belongs to this run.
        Stranger: the dialer talks another protocol.
        OSError: the connection is lost; TimeoutError when the time is up.
    """
    with _Deadline(connection, limit_s) as stream:
        stream.send(party.greeting())
        theirs = stream.take_greeting(party)
        message = party.open(theirs, stream.take(message_bytes + PROOF_BYTES))
        if message is None:
            stream.send(bytes(reply_bytes) + party.REFUSAL)
            raise Refused
    return theirs, message


class _Deadline:
    """Blocking reads and writes on a connection, all of which end at one moment."""

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
        """Returns the challenge in the other end's greeting; raises Stranger at the first byte that fits none."""
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
