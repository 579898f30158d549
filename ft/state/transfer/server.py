"""Serves the requests of other processes for states, and stores the states that they push.

    ASK    which state; "section"           -> STATE table, envelope; or NOT_HELD "reason", "later"
    RANGE  "start", "stop" of that state    -> chunks and their end
    WORDS  which state                      -> STATE envelope; or NOT_HELD
    PUSH   which state; table, envelope     -> READY, then chunks and their end -> HELD; or DAMAGED "offset"; or REFUSED
                                               "reason"

A state is its tensors, laid out as in its table, and an envelope, which is everything else. A state that was asked for
on a connection is kept for it, if its holder can do that, until another one is asked for or the connection ends.

The one operation of every transfer is that a range of a state's bytes goes from one memory to another in checked chunks
(:func:`send_range`, :func:`receive_range`). The state is laid out as one contiguous run of bytes
(:class:`ft.state.layout.Table`). A range is sent as frames:

    CHUNK  up to 1 MiB of the state, at its offset
    DONE   all chunks of the range were sent while the state was unchanged
    GONE   the state was withdrawn or overwritten: everything that was received is invalid
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

from ft.net.framed import BadFrame, Bytes, FramedChannel, Mark, ReceivedMessage, checksum
from ft.net.listener import Listener
from ft.net.streams import Network
from ft.state.layout import CHUNK, StateMemory, Table

PURPOSE = "ft-transfer-1"
ASK, RANGE, WORDS, STATE, NOT_HELD = b"ASK ", b"RANG", b"WORD", b"STAT", b"NONE"
PUSH, READY, HELD, DAMAGED, REFUSED = b"PUSH", b"REDY", b"HELD", b"DAMG", b"REFU"
CHUNK_KIND, DONE, GONE = b"CHNK", b"DONE", b"GONE"

Disturb = Callable[[int, int, list[Bytes]], list[list[Bytes]]]
"""Function (index of a chunk, number of chunks, pieces of its frame) -> frames to send instead, for fault injection."""


class Withdrawn(Exception):
    """The state must not be read any more."""


class Gone(Exception):
    """The other end has withdrawn the state."""


def send_range(
    channel: FramedChannel,
    mark: Mark,
    piece: range,
    reading: Callable[[int, int], AbstractContextManager[StateMemory]],
    disturb: Disturb | None = None,
) -> None:
    """Send a range of a state.

    Args:
        channel: channel to the receiver.
        mark: the state.
        piece: range of bytes.
        reading: function (start, stop) -> context in which the bytes [start, stop) do not change; raises
            :class:`Withdrawn`, when it is entered or left, if they have changed or may change.
        disturb: for fault injection.
    """
    count = -(-len(piece) // CHUNK)
    try:
        for index, start in enumerate(range(piece.start, piece.stop, CHUNK)):
            stop = min(start + CHUNK, piece.stop)
            with reading(start, stop) as memory:
                frame = channel.pack(CHUNK_KIND, mark, start, *_chunk(channel, memory, start, stop))
                for sent in [frame] if disturb is None else disturb(index, count, frame):
                    channel.write(sent)
    except Withdrawn:
        channel.send(GONE, mark)
    else:
        channel.send(DONE, mark)


def receive_range(
    channel: FramedChannel, mark: Mark, piece: range, memory: StateMemory, moved: Callable[[], None] = lambda: None
) -> int | None:
    """Receive a range of a state.

    Args:
        channel: channel to the sender.
        mark: the state; chunks of another one are refused.
        piece: range of bytes.
        memory: memory to write into; not valid before this function has returned None.
        moved: called after every chunk.

    Returns:
        offset of the first chunk that does not match its checksum; None if all do.

    Raises:
        Gone: the sender has withdrawn the state.
        BadFrame: something else was received. The channel has to be closed.
    """
    damaged = None
    for start in range(piece.start, piece.stop, CHUNK):
        stop = min(start + CHUNK, piece.stop)
        head = channel.next()
        if head.kind == GONE:
            raise Gone("the state was withdrawn during the transfer")
        if (head.kind, head.mark, head.offset) != (CHUNK_KIND, mark, start):
            raise BadFrame(f"{head} instead of the chunk at byte {start} of {mark}")
        place = memory.whole(start, stop)
        is_sound = channel.take(head, channel.scratch(stop - start) if place is None else place)
        if place is None and is_sound:
            memory.scatter(start, stop, channel.scratch(stop - start))
        memory.note(start, head.check)
        if not is_sound and damaged is None:
            damaged = start
        moved()
    end = channel.receive()
    if end.kind == GONE:
        raise Gone("the state was withdrawn during the transfer")
    if (end.kind, end.mark) != (DONE, mark):
        raise BadFrame(f"{end} instead of the end of {mark}")
    return damaged


def _chunk(channel: FramedChannel, memory: StateMemory, start: int, stop: int) -> tuple[Bytes, int]:
    """Return the bytes [start, stop) and their checksum."""
    chunk = memory.whole(start, stop)
    if chunk is None:
        chunk = channel.scratch(stop - start)
        memory.gather(start, stop, chunk)
    return chunk, memory.checksum(start, chunk)


class NotHeld(Exception):
    """The requested state is not held here.

    Args:
        reason: what is held instead, as a sentence.
        later: whether the requested state may still come.
    """

    def __init__(self, reason: str, later: bool = False):
        super().__init__(reason)
        self.later = later


class TransferRefused(Exception):
    """A pushed state is not accepted; the text is sent to its sender."""


@dataclass(eq=False)
class Visit:
    """A pull under way on one connection.

    Attributes:
        peer: address of the pulling process.
        nbytes: size of the whole state in bytes.
        sent: number of bytes sent so far.
    """

    peer: str
    nbytes: int
    sent: int = 0


class Held(ABC):
    """A state that a server gives out.

    Attributes:
        mark: which state it is.
        table: layout of its tensors.
        envelope: everything but the tensors, encoded.
        envelope_check: checksum of the envelope, computed when it was made.
        whose: logical rank and replica whose state it is, in words.
    """

    mark: Mark
    table: Table
    envelope: bytes
    envelope_check: int
    whose: str

    @abstractmethod
    def reading(self, channel: FramedChannel) -> AbstractContextManager[StateMemory]:
        """Return a context in which the state may be read, to send one chunk. A withdrawal may shut ``channel`` down.

        Raises:
            Withdrawn: the state must not be read any more, or has changed inside the context.
        """

    def visit(self, peer: str) -> Visit:
        """Register a pull by the process at address ``peer``. Raises NotHeld if no new pull is accepted."""
        return Visit(peer, self.table.nbytes)

    def leave(self, visit: Visit) -> None:
        """Note that a pull has ended."""
        return


class Arrival(AbstractContextManager["Arrival"]):
    """A pushed state that is being received; a context that drops it at its end if it was not committed.

    Attributes:
        memory: the memory for it.
    """

    memory: StateMemory

    @abstractmethod
    def commit(self) -> bool:
        """Keep the state, which is complete; return whether it is still wanted."""


class Holder:
    """What a server gives out and stores. This base class does neither."""

    def find(self, mark: Mark, section: str) -> Held:
        """Return the section of a state. Raises NotHeld if it is not held."""
        raise NotHeld("no states are given out here")

    def envelope_of(self, mark: Mark) -> bytes:
        """Return the envelope of a state. Raises NotHeld if it is not held."""
        raise NotHeld("no envelopes are given out here")

    def begin(self, channel: FramedChannel, mark: Mark, table: bytes, envelope: bytes) -> Arrival:
        """Accept a pushed state that arrives over ``channel``. Raises TransferRefused if it is not accepted."""
        raise TransferRefused("no copies are taken here")


def serve(
    network: Network,
    token: str,
    holder: Holder,
    *,
    patience_s: float,
    idle_s: float = 0.0,
    name: str,
    is_background: bool = False,
) -> Listener:
    """Listen and serve until the listener is closed.

    Args:
        network: network at whose address to listen.
        token: token of the run; peers without it are refused.
        holder: what is given out and stored.
        patience_s: longest time without progress within a request, in seconds.
        idle_s: longest time between two requests of a connection, in seconds; 0: no limit.
        name: name of the threads.
        is_background: whether serving has a lower scheduling priority than training.

    Raises:
        OSError: the network cannot listen at this address.
    """

    def answer_all(channel: FramedChannel, peer: str) -> None:
        desk = _Desk(holder, channel, peer)
        try:
            while True:
                channel.be_patient(idle_s)
                request = channel.receive()
                channel.be_patient(patience_s)
                desk.answer(request)
        finally:
            desk.leave()

    return Listener(network, token, PURPOSE, answer_all, name=name, is_background=is_background)


class _Desk:
    """Answers the requests of one connection."""

    def __init__(self, holder: Holder, channel: FramedChannel, peer: str):
        self._holder, self._channel, self._peer = holder, channel, peer
        self._visit: tuple[Held, Visit] | None = None

    def answer(self, request: ReceivedMessage) -> None:
        try:
            answers = {ASK: self._send_state, RANGE: self._send_range, WORDS: self._send_words, PUSH: self._store}
            answers[request.kind](request)
        except NotHeld as refusal:
            self._channel.send(NOT_HELD, request.mark, {"reason": str(refusal), "later": refusal.later})
        except (KeyError, ValueError, TypeError) as error:
            raise BadFrame(f"no such request: {error!r}") from error

    def leave(self) -> None:
        if self._visit is not None:
            held, visit = self._visit
            held.leave(visit)
            self._visit = None

    def _send_state(self, request: ReceivedMessage) -> None:
        self.leave()
        held = self._holder.find(request.mark, str(request.words["section"]))
        self._visit = held, held.visit(self._peer)
        words = {"whose": held.whose, "envelope_check": held.envelope_check}
        self._channel.send(STATE, held.mark, words, held.table.encoded, held.envelope)

    def _send_words(self, request: ReceivedMessage) -> None:
        envelope = self._holder.envelope_of(request.mark)
        self._channel.send(STATE, request.mark, {"envelope_check": checksum(envelope)}, envelope)

    def _send_range(self, request: ReceivedMessage) -> None:
        start, stop = int(request.words["start"]), int(request.words["stop"])
        if self._visit is None or request.mark != self._visit[0].mark:
            raise ValueError("bytes of a state that was not asked for")
        held, visit = self._visit
        if not 0 <= start <= stop <= held.table.nbytes:
            raise ValueError(f"bytes {start} to {stop} of a state of {held.table.nbytes} bytes")

        @contextmanager
        def reading(start: int, stop: int) -> Iterator[StateMemory]:
            with held.reading(self._channel) as memory:
                yield memory
            visit.sent += stop - start

        send_range(self._channel, held.mark, range(start, stop), reading)

    def _store(self, request: ReceivedMessage) -> None:
        mark, (table, envelope) = request.mark, request.bodies
        if min(mark) < 0:
            raise ValueError(f"a state of {mark}")
        try:
            arrival = self._holder.begin(self._channel, mark, table, envelope)
        except TransferRefused as refusal:
            self._channel.send(REFUSED, mark, {"reason": str(refusal)})
            return
        with arrival:
            self._channel.send(READY, mark)
            damaged = receive_range(self._channel, mark, range(arrival.memory.table.nbytes), arrival.memory)
            is_kept = damaged is None and arrival.commit()
        if damaged is not None:
            self._channel.send(DAMAGED, mark, {"offset": damaged})
        elif is_kept:
            self._channel.send(HELD, mark)
        else:
            self._channel.send(REFUSED, mark, {"reason": "its epoch is over"})
