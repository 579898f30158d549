"""Pulls a state from one process that gives it out, the source."""

import contextlib
import threading
import time
from collections.abc import Iterator

from ft.net import handshake
from ft.net.framed import BadFrame, FramedChannel, Mark, ReceivedMessage, checksum
from ft.net.streams import Network
from ft.state.layout import BadTable, StateMemory, Table
from ft.state.transfer.server import ASK, NOT_HELD, PURPOSE, RANGE, STATE, WORDS, Gone, receive_range

__all__ = ["Bad", "Damaged", "Gone", "Lost", "OpenSource", "Silent"]

_PERIOD_S = 0.02


class Lost(Exception):
    """No process of this run answers at the address, or its connection has ended."""


class Silent(Lost):
    """The source has stopped answering."""


class Bad(Exception):
    """The source's answer or data is not the requested state."""


class Damaged(Bad):
    """A chunk does not match its checksum."""


class OpenSource:
    """One connection to a source, used by one thread; :meth:`cut` ends it from another thread.

    All operations raise :class:`Gone` if the source does not hold the state (any more), :class:`Lost` if the connection
    failed or the peer does not belong to the run, and :class:`Bad` if it holds or sends something else.

    Args:
        network: the network of the address.
        address: address of the source.
        token: token of the run.
        patience_s: longest time without progress in a connection, an answer or a chunk, in seconds.

    Attributes:
        since: time.monotonic() of the last progress, None while no progress is expected of the source.
    """

    def __init__(self, network: Network, address: str, token: str, patience_s: float):
        self.address = address
        self.since: float | None = None
        self._network, self._token, self._patience = network, token, patience_s
        self._lock = threading.Lock()
        self._channel: FramedChannel | None = None
        self._cut: str | None = None
        self._mark = Mark()

    def open(self, limit_s: float | None = None) -> None:
        """Connect, within ``limit_s`` seconds (default: ``patience_s``), and run the handshake."""
        with self._failures():
            self.since = time.monotonic()
            channel = FramedChannel(self._network.dial(self.address, limit_s or self._patience), self._patience)
            with self._lock:
                self._channel = channel
                if self._cut is not None:
                    raise Lost(self._cut)
            channel.dial(self._token, PURPOSE, self._patience)
            self.since = time.monotonic()

    def state(self, wanted: Mark, table: Table, section: str = "") -> bytes:
        """Wait until the source holds the wanted state, and return its envelope if its tensors match ``table``.

        If the source can, it keeps its state for this connection from then on. ``section`` is that of the state to
        receive, if the source has several.
        """
        with self._failures():
            theirs, envelope = self._ask(wanted, section)
            if theirs != table.encoded:
                raise Bad(f"has other tensors than this rank: {Table.decode(theirs).difference(table)}")
            return envelope

    def offer(self, wanted: Mark, section: str = "") -> tuple[Mark, Table, bytes]:
        """Do what :meth:`state` does, and return which state the source holds, its layout and its envelope.

        In ``wanted``, -1 stands for whichever the source holds: of a step, its newest.
        """
        with self._failures():
            table, envelope = self._ask(wanted, section)
            return self._mark, Table.decode(table), envelope

    def _ask(self, wanted: Mark, section: str) -> tuple[bytes, bytes]:
        """Return the encoded layout of the wanted state, and its envelope; note which state it is."""
        answer = self._when_held(ASK, wanted, section)
        table, envelope = answer.bodies
        if not all(asked in (-1, given) for asked, given in zip(wanted, answer.mark, strict=True)):
            raise Bad(f"serves {answer.words['whose']}, {answer.mark}, instead of {wanted}")
        self._mark = answer.mark
        return table, _sound(answer, envelope)

    def envelope(self, wanted: Mark) -> bytes:
        """Return the envelope alone."""
        with self._failures():
            answer = self._when_held(WORDS, wanted)
            (envelope,) = answer.bodies
            return _sound(answer, envelope)

    def receive(self, piece: range, into: StateMemory) -> None:
        """Receive a range of the bytes of the state that :meth:`state` has asked for.

        Raises:
            Damaged: a chunk does not match its checksum; the connection remains usable.
        """
        with self._failures():
            self.since = time.monotonic()
            channel = self._opened()
            channel.send(RANGE, self._mark, {"start": piece.start, "stop": piece.stop})
            damaged = receive_range(channel, self._mark, piece, into, self._progress)
        if damaged is not None:
            raise Damaged(f"the chunk at byte {damaged} does not have its checksum")

    def cut(self, reason: str) -> None:
        """Abort any use of the connection: its thread gets Lost(reason). May be called from any thread."""
        with self._lock:
            if self._cut is None:
                self._cut = reason
            if self._channel is not None:
                self._channel.shutdown()

    def is_connected(self) -> bool:
        with self._lock:
            return self._channel is not None

    def close(self) -> None:
        """Close the connection. Only the thread that uses it may call this."""
        self.since = None
        with self._lock:
            if self._channel is not None:
                self._channel.close()

    def _opened(self) -> FramedChannel:
        if self._channel is None:
            raise Lost("is not connected")
        return self._channel

    def _progress(self) -> None:
        self.since = time.monotonic()

    def _when_held(self, kind: bytes, wanted: Mark, section: str = "") -> ReceivedMessage:
        """Return the answer to a request; repeat it while the source has not reached the step yet."""
        until = time.monotonic() + self._patience
        while True:
            self.since = time.monotonic()
            channel = self._opened()
            channel.send(kind, wanted, {"section": section})
            answer = channel.receive()
            if answer.kind == STATE:
                return answer
            if answer.kind != NOT_HELD:
                raise Bad(f"answers {answer.kind!r}")
            if not answer.words["later"]:
                raise Gone(answer.words["reason"])
            if time.monotonic() > until or self._cut is not None:
                raise Gone(f"has not come to the end of step {wanted.step} in time: {answer.words['reason']}")
            time.sleep(_PERIOD_S)

    @contextlib.contextmanager
    def _failures(self) -> Iterator[None]:
        """Translate the errors of a connection into this module's exceptions."""
        try:
            yield
        except Gone:
            raise
        except Exception as error:
            if self._cut is not None:
                raise Lost(self._cut) from error
            if isinstance(error, handshake.HandshakeRefused):
                raise Lost("has another token: it does not belong to this run") from error
            if isinstance(error, TimeoutError):
                raise Silent(f"does not answer: {error}") from error
            if isinstance(error, OSError):
                raise Lost(f"{type(error).__name__}: {error}") from error
            if isinstance(error, BadFrame | BadTable | ValueError | KeyError | TypeError):
                raise Bad(f"an answer that makes no sense: {error!r}") from error
            raise


def _sound(answer: ReceivedMessage, envelope: bytes) -> bytes:
    """Return the envelope in an answer if it was not damaged in the source's memory."""
    if checksum(envelope) != answer.words["envelope_check"]:
        raise Bad("has a damaged envelope")
    return envelope
