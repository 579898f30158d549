"""The state that a rank offers to the same rank of other replicas, and the fetches that read it.

A rank of a healthy replica (a full copy of the model) offers its training state while it computes the next step, and
withdraws the offer before the optimizer changes the tensors (FT-HSDP, section 4.3). The tensors are the live ones, so
no reader may continue after the withdrawal. The envelope of a state is everything but the tensors, as JSON. A state is
identified by its step and its lineage, the number of the quorum in which that step was committed.
"""

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ft.state.fetch.memory import FlatState
from ft.state.fetch.staging import Tensors, ToHost
from ft.state.snapshot.layout import Table


class NotHeld(Exception):
    """The requested state or envelope is not held here.

    Args:
        reason: which state or envelope is held instead, as a sentence.
        newest: newest step whose envelope is held, None before the first.
    """

    def __init__(self, reason: str, newest: int | None = None):
        super().__init__(reason)
        self.newest = newest


class Withdrawn(NotHeld):
    """The state was withdrawn and must not be read any more."""


@dataclass(frozen=True)
class Envelope:
    """The JSON values that belong to a state.

    Attributes:
        step: the state is that of the end of this step.
        lineage: number of the quorum in which the step was committed.
        content: the values, encoded as JSON text.
    """

    step: int
    lineage: int
    content: str

    @classmethod
    def of(cls, step: int, lineage: int, content: Mapping[str, Any]) -> "Envelope":
        return cls(step, lineage, json.dumps(content, separators=(",", ":")))


@dataclass(frozen=True)
class Cut:
    """A fetch that was ended by a withdrawal.

    Attributes:
        peer: address of the fetching rank.
        sent: number of bytes that had been sent.
        nbytes: size of the whole state in bytes.
    """

    peer: str
    sent: int
    nbytes: int


@dataclass(eq=False)
class Visit:
    """A fetch under way on one connection.

    Attributes:
        peer: address of the fetching rank.
        sent: number of bytes sent so far.
    """

    peer: str
    sent: int = 0


class Offer:
    """The state of one step, from its offer to its withdrawal. Thread-safe.

    Args:
        envelope: JSON values that accompany the tensors.
        table: layout of the tensors.
        tensors: the live tensors.
        to_host: function that copies the tensors to host memory; called once, at the first read.
    """

    def __init__(
        self,
        envelope: Envelope,
        table: Table,
        tensors: Tensors,
        to_host: ToHost,
    ):
        self.envelope, self.table = envelope, table
        self._tensors, self._to_host = tensors, to_host
        self._memory: FlatState | None = None
        self._filling = threading.Lock()
        self._changed = threading.Condition()
        self._visits: set[Visit] = set()
        self._reading: list[socket.socket] = []
        self._closing, self._closed = False, False

    @property
    def step(self) -> int:
        return self.envelope.step

    @property
    def lineage(self) -> int:
        return self.envelope.lineage

    def visit(self, peer: str) -> Visit:
        """Register a fetch by the rank at address ``peer``.

        Raises:
            Withdrawn: the withdrawal has begun, so no new fetch is accepted.
        """
        with self._changed:
            if self._closing:
                raise self._withdrawn()
            visit = Visit(peer)
            self._visits.add(visit)
            return visit

    def leave(self, visit: Visit) -> None:
        with self._changed:
            self._visits.discard(visit)
            self._changed.notify_all()

    def under_way(self) -> int:
        with self._changed:
            return len(self._visits)

    @contextlib.contextmanager
    def reading(self, connection: socket.socket) -> Iterator[FlatState]:
        """Return a context in which the state may be read, to compute the checksum of one block and send the block.

        A withdrawal waits until all contexts have ended, so the tensors do not change inside a context. The withdrawal
        also shuts ``connection`` down, so that a peer that does not receive cannot delay it.

        Raises:
            Withdrawn: the state must not be read any more.
        """
        with self._changed:
            if self._closed:
                raise self._withdrawn()
            self._reading.append(connection)
        try:
            with self._filling:
                if self._memory is None:
                    self._memory = self._fill()
            yield self._memory
        finally:
            with self._changed:
                self._reading.remove(connection)
                self._changed.notify_all()

    def withdraw(self, wait_s: float) -> list[Cut]:
        """Accept no new fetches, wait up to ``wait_s`` seconds for those under way, and cut off the rest.

        Returns:
            The fetches that were cut off. No thread reads the tensors after this method has returned.
        """
        deadline = time.monotonic() + wait_s
        with self._changed:
            self._closing = True
            self._changed.wait_for(lambda: not self._visits, timeout=max(0.0, deadline - time.monotonic()))
            self._closed = True
            cut = [Cut(visit.peer, visit.sent, self.table.nbytes) for visit in self._visits]
            for connection in self._reading:
                with contextlib.suppress(OSError):  # it has closed already
                    connection.shutdown(socket.SHUT_RDWR)
            self._changed.wait_for(lambda: not self._reading)
            self._visits.clear()
            self._memory, self._tensors = None, {}
        return cut

    def _fill(self) -> FlatState:
        host = self._to_host(self._tensors, lambda: self._closed)
        if self._closed:
            raise self._withdrawn()
        memory = FlatState(host)
        if memory.table.encoded != self.table.encoded:
            difference = self.table.difference(memory.table)
            raise Withdrawn(f"the tensors were changed since they were offered: {difference}", self.step)
        return memory

    def _withdrawn(self) -> Withdrawn:
        return Withdrawn(f"the state of step {self.step}, lineage {self.lineage} was withdrawn", self.step)


class Shelf:
    """The data that a state server can send: the offered state, if there is one, and the newest envelope."""

    def __init__(self):
        self._lock = threading.Lock()
        self._offer: Offer | None = None
        self._envelope: Envelope | None = None

    def put(self, offer: Offer) -> None:
        with self._lock:
            self._offer, self._envelope = offer, offer.envelope

    def keep(self, envelope: Envelope) -> None:
        with self._lock:
            self._envelope = envelope

    def take(self) -> Offer | None:
        """Return the offer, None if there is none. The offer stays here until :meth:`drop`, after its withdrawal."""
        with self._lock:
            return self._offer

    def drop(self, offer: Offer) -> None:
        with self._lock:
            if self._offer is offer:
                self._offer = None

    def find(self, step: int, lineage: int) -> Offer:
        """Return the offer of the state of ``step`` and ``lineage``.

        Raises:
            NotHeld: no state or another state is offered.
        """
        with self._lock:
            offer, newest = self._offer, self._newest()
        if offer is None or (offer.step, offer.lineage) != (step, lineage):
            held = "none" if offer is None else f"that of step {offer.step}, lineage {offer.lineage}"
            raise NotHeld(f"asked for the state of step {step}, lineage {lineage}; on offer: {held}", newest)
        return offer

    def find_envelope(self, step: int, lineage: int) -> Envelope:
        """Return the envelope of the end of ``step``, committed in the quorum ``lineage``.

        Raises:
            NotHeld: no envelope or another envelope is held.
        """
        with self._lock:
            envelope, newest = self._envelope, self._newest()
        if envelope is None or (envelope.step, envelope.lineage) != (step, lineage):
            held = "none" if envelope is None else f"that of step {envelope.step}, lineage {envelope.lineage}"
            raise NotHeld(f"asked for the envelope of step {step}, lineage {lineage}; held: {held}", newest)
        return envelope

    def _newest(self) -> int | None:
        return None if self._envelope is None else self._envelope.step
