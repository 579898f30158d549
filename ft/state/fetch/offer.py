"""The state that a rank offers to the same rank of other replicas, and the fetches that read it.

A rank of a healthy replica (a full copy of the model) offers its training state while it computes the next step, and
withdraws the offer before the optimizer changes the tensors (FT-HSDP, section 4.3). The tensors are the live ones, so
no reader may continue after the withdrawal. The envelope of a state is everything but the tensors, as JSON. A state is
identified by its step and its lineage, the number of the quorum in which that step was committed.
"""

import contextlib
import json
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ft.net.framed import FramedChannel, Mark, checksum
from ft.state.fetch.memory import FlatState
from ft.state.fetch.staging import Tensors, ToHost
from ft.state.layout import Table
from ft.state.transfer.moving import Withdrawn
from ft.state.transfer.server import Held, Holder, NotHeld, Visit


@dataclass(frozen=True)
class Envelope:
    """The JSON values that belong to a state.

    Attributes:
        mark: step and lineage of the state.
        content: the values, encoded as JSON.
    """

    mark: Mark
    content: bytes

    @classmethod
    def of(cls, step: int, lineage: int, content: Mapping[str, Any]) -> "Envelope":
        return cls(Mark(-1, step, lineage), json.dumps(content, separators=(",", ":")).encode())


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


class Offer(Held):
    """The state of one step, from its offer to its withdrawal. Thread-safe.

    Args:
        envelope: JSON values that accompany the tensors.
        table: layout of the tensors.
        tensors: the live tensors.
        to_host: function that copies the tensors to host memory; called once, at the first read.
        replica: number of the replica whose state it is.
        rank: logical rank whose state it is.
    """

    def __init__(
        self, envelope: Envelope, table: Table, tensors: Tensors, to_host: ToHost, replica: int = 0, rank: int = 0
    ):
        self.mark, self.table = envelope.mark._replace(rank=rank), table
        self.whose = f"logical rank {rank} of replica {replica}"
        self.envelope, self.envelope_check = envelope.content, checksum(envelope.content)
        self._tensors, self._to_host = tensors, to_host
        self._memory: FlatState | None = None
        self._filling = threading.Lock()
        self._changed = threading.Condition()
        self._visits: set[Visit] = set()
        self._reading: list[FramedChannel] = []
        self._closing, self._closed = False, False

    def visit(self, peer: str) -> Visit:
        """Register a fetch by the rank at address ``peer``.

        Raises:
            NotHeld: the withdrawal has begun, so no new fetch is accepted.
        """
        with self._changed:
            if self._closing:
                raise NotHeld(self._withdrawn())
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
    def reading(self, channel: FramedChannel) -> Iterator[FlatState]:
        """Return a context in which the state may be read, to compute the checksum of one block and send the block.

        A withdrawal waits until all contexts have ended, so the tensors do not change inside a context. The withdrawal
        also shuts ``channel`` down, so that a peer that does not receive cannot delay it.

        Raises:
            Withdrawn: the state must not be read any more.
        """
        with self._changed:
            if self._closed:
                raise Withdrawn(self._withdrawn())
            self._reading.append(channel)
        try:
            with self._filling:
                if self._memory is None:
                    self._memory = self._fill()
            yield self._memory
        finally:
            with self._changed:
                self._reading.remove(channel)
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
            for channel in self._reading:
                channel.shutdown()
            self._changed.wait_for(lambda: not self._reading)
            self._visits.clear()
            self._memory, self._tensors = None, {}
        return cut

    def _fill(self) -> FlatState:
        host = self._to_host(self._tensors, lambda: self._closed)
        if self._closed:
            raise Withdrawn(self._withdrawn())
        memory = FlatState(host)
        if memory.table.encoded != self.table.encoded:
            difference = self.table.difference(memory.table)
            raise Withdrawn(f"the tensors were changed since they were offered: {difference}")
        return memory

    def _withdrawn(self) -> str:
        return f"the state of step {self.mark.step}, lineage {self.mark.epoch} was withdrawn"


class Shelf(Holder):
    """The data that a state server can send: the offered state, if there is one, and the newest envelope.

    Reading the two attributes is safe in any thread.

    Attributes:
        offer: the offered state; it stays here until its withdrawal is complete.
        words: the newest envelope.
    """

    def __init__(self):
        self.offer: Offer | None = None
        self.words: Envelope | None = None

    def find(self, mark: Mark, section: str) -> Offer:
        offer = self.offer
        if offer is None or offer.mark[1:] != mark[1:]:
            raise self._not_held("state", mark, "on offer", offer)
        return offer

    def envelope(self, mark: Mark) -> bytes:
        words = self.words
        if words is None or words.mark[1:] != mark[1:]:
            raise self._not_held("envelope", mark, "held", words)
        return words.content

    def _not_held(self, what: str, mark: Mark, where: str, held: Offer | Envelope | None) -> NotHeld:
        newest = self.words
        other = "none" if held is None else f"that of step {held.mark.step}, lineage {held.mark.epoch}"
        reason = f"asked for the {what} of step {mark.step}, lineage {mark.epoch}; {where}: {other}"
        return NotHeld(reason, later=newest is None or newest.mark.step < mark.step)
