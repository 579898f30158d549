"""The server side of snapshot transfers: gives out the snapshots of a worker, and stores peer copies that others send.

A snapshot is a copy of one rank's training state in host memory. Its tensors are in two sections, OWNED (tensors that
no other rank has) and REPLICATED (tensors that all data-parallel peers have); its envelope contains everything else. A
peer copy consists of the section OWNED and the envelope of another rank's snapshot; that rank is its owner. A mark
names the rank, step and epoch of a snapshot.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from ft.base.errors import FallbackError
from ft.net.framed import FramedChannel, Mark
from ft.state.layout import Table
from ft.state.snapshot.buffers import Part, Slot, Status
from ft.state.snapshot.copy_store import CopyStore
from ft.state.snapshot.state import OWNED, REPLICATED
from ft.state.transfer.moving import Withdrawn
from ft.state.transfer.server import Arrival, Held, Holder, NotHeld, Refused

_REPLACED_END_S = 10.0
"""Maximum seconds to wait for the end of a transfer that a newer connection of the same owner replaces."""


class _HeldSnapshot(Held):
    """A section of a complete snapshot."""

    def __init__(self, slot: Slot, mark: Mark, section: str):
        self._slot, self._part = slot, slot.parts[section]
        self.mark, self.table, self.whose = mark, self._part.table, f"logical rank {mark.rank}"
        self.envelope, self.envelope_check = slot.meta, slot.meta_checksum

    @contextmanager
    def reading(self, channel: FramedChannel) -> Iterator[Part]:
        yield self._part
        # The snapshot is not locked while it is read: its memory may have been reused for a newer one meanwhile.
        if (self._slot.status, self._slot.step, self._slot.epoch) != (Status.COMPLETE, *self.mark[1:]):
            raise Withdrawn


class _Arrival(Arrival):
    """A peer copy that is being received."""

    def __init__(self, holder: "SnapshotHolder", channel: FramedChannel, mark: Mark):
        self._holder, self._copies = holder, holder.stock.copies(mark.rank)
        self._slot: Slot | None = None
        self.channel, self.mark = channel, mark
        self.ended = threading.Event()

    def prepare(self, table: Table, envelope: bytes) -> None:
        """Allocate memory for the copy."""
        self._slot = self._copies.begin(self.mark.step, self.mark.epoch, {OWNED: table})
        self._slot.set_meta(envelope)
        self.memory = self._slot.parts[OWNED]

    def commit(self) -> bool:
        with self._holder.lock:
            is_wanted = self.mark.epoch > self._holder.closed and self._holder.arrivals.get(self.mark.rank) is self
            if is_wanted:
                self._copies.commit(self._slot)
                self._slot = None
        return is_wanted

    def __exit__(self, *_: object) -> None:
        if self._slot is not None:
            self._copies.drop(self._slot)
        with self._holder.lock:
            if self._holder.arrivals.get(self.mark.rank) is self:
                del self._holder.arrivals[self.mark.rank]
        self.ended.set()


class SnapshotHolder(Holder):
    """Stores peer copies and gives out snapshots. The server (:mod:`ft.state.transfer.server`) calls its methods in the
    threads of the connections.

    At most one copy of each owner is received at a time. A newer connection of the same owner replaces an older one,
    because the sender of the older one has died or has lost its connection.

    Args:
        stock: the snapshots that this worker holds.
        max_bytes: maximum size of a peer copy in bytes; a larger one is refused.

    Attributes:
        stock: as passed.
        arrivals: logical rank -> its copy that is being received; guarded by ``lock``.
        closed: number of the last epoch that is over; guarded by ``lock``.
        lock: guards the attributes.
    """

    def __init__(self, stock: CopyStore, max_bytes: int):
        self.stock, self._max_bytes = stock, max_bytes
        self.arrivals: dict[int, _Arrival] = {}
        self._newest = self.closed = -1
        self.lock = threading.Lock()

    def cancel(self, epoch: int) -> None:
        """Abort the copies that are being received, and refuse ``epoch`` and earlier epochs from now on."""
        with self.lock:
            self.closed = max(self.closed, epoch)
        for arrival in self._over():
            arrival.channel.shutdown()

    def quiesce(self) -> None:
        """Wait until the transfers that ``cancel`` has aborted have ended."""
        for arrival in self._over():
            arrival.ended.wait()

    def find(self, mark: Mark, section: str) -> Held:
        slot = self.stock.find(mark.rank, mark.step)
        if slot is None or section not in slot.parts or section not in (OWNED, REPLICATED):
            raise NotHeld(f"this worker does not hold that snapshot (it holds {self.stock.holdings()})")
        return _HeldSnapshot(slot, Mark(mark.rank, mark.step, slot.epoch), section)

    def begin(self, channel: FramedChannel, mark: Mark, table: bytes, envelope: bytes) -> Arrival:
        layout = self._known_table(mark.rank, table)
        arrival = _Arrival(self, channel, mark)
        self._admit(arrival)
        try:
            arrival.prepare(layout, envelope)
        except BaseException:
            arrival.__exit__()
            raise
        return arrival

    def _known_table(self, owner: int, encoded: bytes) -> Table:
        newest = self.stock.copies(owner).find()
        if newest is not None and newest.parts[OWNED].table.encoded == encoded:
            return newest.parts[OWNED].table
        try:
            table = Table.decode(encoded)
        except FallbackError as error:
            raise Refused(str(error)) from error
        if table.nbytes > self._max_bytes:
            raise Refused(f"a copy of {table.nbytes} bytes; at most {self._max_bytes} are taken here")
        return table

    def _admit(self, arrival: _Arrival) -> None:
        """Register a copy that is being received, and end an earlier one of the same owner that is not complete.

        Raises:
            Refused: the epoch in which the copy was sent is over.
        """
        owner, epoch = arrival.mark.rank, arrival.mark.epoch
        with self.lock:
            if epoch <= self.closed or epoch < self._newest:
                raise Refused(f"epoch {epoch} is over (closed: {self.closed}, newest: {self._newest})")
            self._newest = epoch
            before = self.arrivals.get(owner)
            self.arrivals[owner] = arrival
        if before is not None:
            before.channel.shutdown()
            if not before.ended.wait(_REPLACED_END_S):
                raise Refused(f"an earlier transfer for rank {owner} does not end")

    def _over(self) -> list[_Arrival]:
        """Return the arrivals of closed epochs."""
        with self.lock:
            return [arrival for arrival in self.arrivals.values() if arrival.mark.epoch <= self.closed]
