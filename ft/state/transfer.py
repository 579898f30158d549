"""Transfer of a rank's state between the memories of two processes, over framed channels (:mod:`ft.net.framed`).

A state is pushed to a peer, as after every step to the peers that hold copies of a snapshot (:class:`Sender`); or it is
pulled by a rank that has lost it or is behind (:class:`OpenSource`). :func:`serve` stores pushed states and gives out
pulled ones, by these requests:

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

What is stored, given out and filled is behind :class:`ft.state.layout.StateMemory`, :class:`CopyHolder`, :class:`Held`
and :class:`Arrival`:

    push    ft.state.snapshot: peer copies, into alternating buffers
    pull    ft.state.snapshot: a copy or a snapshot, into a snapshot's buffer
            ft.state.fetch: the live tensors of healthy replicas, from several at once, into live tensors
"""

import contextlib
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

from ft.base.errors import RecoverableError
from ft.net import handshake
from ft.net.framed import BadFrame, Bytes, FramedChannel, Mark, ReceivedMessage, checksum
from ft.net.listener import Listener
from ft.net.streams import Network
from ft.state.layout import CHUNK, BadTable, StateMemory, Table

PURPOSE = "ft-transfer-1"
ASK, RANGE, WORDS, STATE, NOT_HELD = b"ASK ", b"RANG", b"WORD", b"STAT", b"NONE"
PUSH, READY, HELD, DAMAGED, REFUSED = b"PUSH", b"REDY", b"HELD", b"DAMG", b"REFU"
CHUNK_KIND, DONE, GONE = b"CHNK", b"DONE", b"GONE"

Disturb = Callable[[int, int, list[Bytes]], list[list[Bytes]]]
"""A planted fault of the connection: from (index of a chunk, number of chunks, pieces of the chunk's frame) it makes
the frames that are sent in place of that one."""


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


class CopyHolder:
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
    holder: CopyHolder,
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
    """Answers the requests that one peer sends over its connection."""

    def __init__(self, holder: CopyHolder, channel: FramedChannel, peer: str):
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


_PAUSES_S = (0.0, 0.05, 0.25)
"""Seconds before each try: a dropped connection is retried, and a dead peer is reported within half a second."""

CONNECT_S = 3.0
"""Longest time to connect to a peer, in seconds."""


class PeerLost(RecoverableError):
    """A peer cannot be reached, does not answer, or refuses a copy."""


class Cancelled(RecoverableError):
    """The operation was cancelled."""


class _NotTaken(Exception):
    """The peer has refused the state and given a reason; a retry does not help."""


@dataclass(frozen=True)
class Outgoing:
    """A state that is being pushed.

    Attributes:
        mark: which state it is, with the epoch in which it was taken.
        memory: its tensors.
        envelope: everything but the tensors, encoded.
        ready: waits until the bytes before an offset are written; raises RuntimeError if they will not be.
    """

    mark: Mark
    memory: StateMemory
    envelope: bytes
    ready: Callable[[int], None]


_Job = tuple[Outgoing, Callable[[Exception | None], None], threading.Event]
"""A push, the function to call at its end, and the event that cancels it."""


class Sender:
    """Pushes states to one peer, from one thread, one at a time.

    Args:
        network: the network of the address.
        peer: logical rank of the peer.
        address: address of the peer.
        token: token of the run.
        patience_s: longest time without progress, in seconds.
    """

    def __init__(self, network: Network, peer: int, address: str, token: str, patience_s: float):
        self._network = network
        self._peer, self._address, self._token, self._patience = peer, address, token, patience_s
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._channel: FramedChannel | None = None
        self._disturb: Disturb | None = None
        self._epoch, self._cancelled = -1, threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"ft-push-to-{peer}", daemon=True)
        self._thread.start()

    def send(self, outgoing: Outgoing, ended: Callable[[Exception | None], None]) -> None:
        """Start to push ``outgoing``; ``ended`` is called with None once the peer has it, else with the exception."""
        self._epoch, self._cancelled = outgoing.mark.epoch, threading.Event()
        self._jobs.put((outgoing, ended, self._cancelled))

    def disturb(self, how: Disturb) -> None:
        """Pass the chunks of the next push through ``how``, once. For fault injection."""
        self._disturb = how

    def move(self, address: str) -> None:
        """Set the peer's address; cancel the current push if the address has changed."""
        if address != self._address:
            self._address = address
            self.cancel(self._epoch)

    def cancel(self, epoch: int) -> None:
        """Cancel the current push if it belongs to ``epoch`` or an earlier one."""
        if self._epoch > epoch:
            return
        self._cancelled.set()
        with self._lock:
            if self._channel is not None:
                self._channel.shutdown()

    def close(self) -> None:
        self.cancel(self._epoch)
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            outgoing, ended, cancelled = job
            try:
                ended(self._deliver(outgoing, cancelled))
            finally:
                del job, outgoing, ended, cancelled  # hold no references while the thread waits
        self._drop()

    def _deliver(self, outgoing: Outgoing, cancelled: threading.Event) -> Exception | None:
        whom, problem = f"logical rank {self._peer} at {self._address}", None
        for pause in _PAUSES_S:
            if cancelled.wait(pause) if pause else cancelled.is_set():
                break
            try:
                channel = self._connected()
                if cancelled.is_set():
                    break
                self._push(channel, outgoing)
                return None
            except (ConnectionError, BadFrame) as error:
                problem = error
            except (OSError, handshake.HandshakeRefused, _NotTaken, RuntimeError) as error:
                self._drop()
                return Cancelled("given up") if cancelled.is_set() else PeerLost(f"{whom} takes no copy: {error}")
            self._drop()
        if cancelled.is_set():
            return Cancelled(f"the transfer of step {outgoing.mark.step} to {whom} was given up")
        return PeerLost(f"{whom} takes no copy, after {len(_PAUSES_S)} tries: {problem}")

    def _connected(self) -> FramedChannel:
        with self._lock:
            if self._channel is not None and not self._channel.is_shut:
                return self._channel
        self._drop()
        channel = FramedChannel(self._network.dial(self._address, min(CONNECT_S, self._patience)), self._patience)
        with self._lock:
            self._channel = channel
        channel.dial(self._token, PURPOSE, self._patience)
        return channel

    def _push(self, channel: FramedChannel, outgoing: Outgoing) -> None:
        mark, memory = outgoing.mark, outgoing.memory
        channel.send(PUSH, mark, {}, memory.table.encoded, outgoing.envelope)
        answer = channel.receive()
        if answer.kind == READY:

            @contextmanager
            def reading(start: int, stop: int) -> Iterator[StateMemory]:
                outgoing.ready(stop)
                yield memory

            disturb, self._disturb = self._disturb, None
            send_range(channel, mark, range(memory.table.nbytes), reading, disturb)
            answer = channel.receive()
        if answer.kind == DAMAGED:
            raise ConnectionError(f"the chunk at byte {answer.words.get('offset')} was damaged on the way")
        if answer.kind != HELD:
            raise _NotTaken(str(answer.words.get("reason", answer.kind)))

    def _drop(self) -> None:
        with self._lock:
            channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()


_PERIOD_S = 0.02


class SourceLost(Exception):
    """The source cannot be reached: no process of this run answers at its address, or the connection has ended."""


class SourceSilent(SourceLost):
    """The source has stopped answering."""


class Bad(Exception):
    """The source's answer or data is not the requested state."""


class Damaged(Bad):
    """A chunk does not match its checksum."""


class OpenSource:
    """One connection to a source, used by one thread; :meth:`cut` ends it from another thread.

    All operations raise :class:`Gone` if the source does not hold the state (any more), :class:`SourceLost` if the
    connection failed or the peer does not belong to the run, and :class:`Bad` if it holds or sends something else.

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
                    raise SourceLost(self._cut)
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
            raise SourceLost("is not connected")
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
                raise SourceLost(self._cut) from error
            if isinstance(error, handshake.HandshakeRefused):
                raise SourceLost("has another token: it does not belong to this run") from error
            if isinstance(error, TimeoutError):
                raise SourceSilent(f"does not answer: {error}") from error
            if isinstance(error, OSError):
                raise SourceLost(f"{type(error).__name__}: {error}") from error
            if isinstance(error, BadFrame | BadTable | ValueError | KeyError | TypeError):
                raise Bad(f"an answer that makes no sense: {error!r}") from error
            raise


def _sound(answer: ReceivedMessage, envelope: bytes) -> bytes:
    """Return the envelope in an answer if it was not damaged in the source's memory."""
    if checksum(envelope) != answer.words["envelope_check"]:
        raise Bad("has a damaged envelope")
    return envelope
