"""Moves snapshots of training state between workers, over TCP or another :class:`ft.net.streams.Network`, and holds
those of one worker.

A worker holds its own snapshots, and copies of the snapshots of other ranks, the owners (peer copies). A snapshot's
tensors are in two sections, OWNED (tensors that no other rank has) and REPLICATED (tensors that all data-parallel peers
have); its envelope contains everything else. A peer copy consists of the section OWNED and the envelope. A mark names
the rank, step and epoch of a snapshot.

Every worker runs a server (:mod:`ft.state.transfer`), which stores the snapshots that peers push and gives out the
snapshots that it holds. For each peer that a worker sends snapshots to, it has one :class:`ft.state.transfer.Sender`.
The transport

* owns no buffers: the buffers belong to the store (:class:`CopyStore`), and are allocated once;
* commits a copy only when every chunk has arrived with the right checksum, so that a transfer that ends in any other
  way leaves the previous complete copy intact;
* refuses data of an epoch that is closed or older than the current one;
* never blocks for ever: operations end within ``patience_s`` seconds without progress, and at once on ``cancel``.
"""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

from ft.base.errors import FallbackError
from ft.job.parts import Holdings
from ft.net.framed import FramedChannel, Mark
from ft.net.streams import Network, TcpNetwork
from ft.state import transfer
from ft.state.layout import StateMemory, Table
from ft.state.snapshot.buffers import PingPong, Slot, SlotPart, Status
from ft.state.snapshot.state import OWNED, REPLICATED
from ft.state.transfer import (
    CONNECT_S,
    Arrival,
    Cancelled,
    CopyHolder,
    Disturb,
    Held,
    NotHeld,
    Outgoing,
    PeerLost,
    Sender,
    TransferRefused,
    Withdrawn,
    serve,
)

_EMPTY = Table((), 0)


class Ahead:
    """Fetches the state of a lost worker while its successor is being built (DEADPOOL, section VI-E).

    It has a thread of its own. Only one thread may call the methods, except :meth:`cut`.

    A worker that takes over a logical rank builds its model, and survivors leave their operations, before the control
    plane can decide from which step all go on. Nearly always it is the newest step of which a holder has a copy of the
    lost worker's snapshot. So that copy is fetched at once; if another step or another kind of recovery is decided on,
    it is dropped.

    Args:
        rank: logical rank of the lost worker.
        holders: logical rank of a worker that may have a copy -> address of its server. They are tried in this order.
        connection: function that returns a new connection to the server at an address.
        own: snapshots of this process; its spare memory is used, and its slots are left alone until :meth:`take`.
        connect_s: longest time for a connection, in seconds.
    """

    def __init__(
        self,
        rank: int,
        holders: Mapping[int, str],
        connection: Callable[[str], transfer.OpenSource],
        own: PingPong,
        connect_s: float,
    ):
        self._rank, self._holders, self._own, self._connect_s = rank, holders, own, connect_s
        self._connection = connection
        self._lock = threading.Lock()
        self._holder, self._step = -1, -1
        self._source: transfer.OpenSource | None = None
        self._is_cut = False
        self._slot: Slot | None = None
        self._thread = threading.Thread(target=self._fetch, name="ft-ahead", daemon=True)
        self._thread.start()

    def take(self, tables: Mapping[str, Table], step: int, holder: int) -> tuple[Slot, int] | None:
        """End the fetch, and return its slot if that has the snapshot of ``step``.

        Wait for a fetch under way, unless it is of another step or from another worker than ``holder``, which the
        control plane has found to be alive.

        Args:
            tables: layouts of the sections of this worker's state.
            step: step that is restored.
            holder: logical rank of the worker whose snapshots would be used otherwise; the lost worker's rank if they
                were inherited.

        Returns:
            (the slot, the logical rank of the worker that it came from), or None.
        """
        with self._lock:
            useless = self._slot is None and (self._holder != holder or self._step not in (-1, step))
        if useless:
            self.cut()
        self._thread.join()
        slot, self._slot = self._slot, None
        if slot is None or holder == self._rank or slot.step != step or not slot.fits(tables):
            return None
        self._own.adopt(slot)
        return slot, self._holder

    def cut(self) -> None:
        """End the fetch soon. Safe from any thread."""
        with self._lock:
            self._is_cut = True
            source = self._source
        if source is not None:
            source.cut("the copy is not needed")

    def _fetch(self) -> None:
        for holder, address in self._holders.items():
            source = self._connection(address)
            with self._lock:
                if self._is_cut:
                    return
                self._holder, self._step, self._source = holder, -1, source
            try:
                source.open(self._connect_s)
                slot = self._fetch_from(source)
            except (transfer.Gone, transfer.Bad, transfer.SourceLost):
                continue
            finally:
                source.close()
            with self._lock:
                self._slot = slot
            return

    def _fetch_from(self, source: transfer.OpenSource) -> Slot:
        mark, table, envelope = source.offer(Mark(self._rank), OWNED)
        with self._lock:
            self._step = mark.step
        slot = Slot(step=mark.step, epoch=mark.epoch, owner=-1)
        spare, self._own.spare = self._own.spare, None
        slot.fit({OWNED: table, REPLICATED: _EMPTY}, False, spare)
        slot.set_meta(envelope)
        source.receive(range(table.nbytes), slot.parts[OWNED])
        return slot


class CopyStore:
    """The snapshots that this worker holds. Thread-safe.

    Attributes:
        rank: logical rank of the worker, -1 until it has one.
        own: its own snapshots.
    """

    def __init__(self) -> None:
        self.rank = -1
        self.own = PingPong()
        self._copies: dict[int, PingPong] = {}
        self._lock = threading.Lock()

    def copies(self, owner: int) -> PingPong:
        """Return the two slots for peer copies of ``owner``. Their memory is allocated when the first copy arrives."""
        with self._lock:
            return self._copies.setdefault(owner, PingPong(owner))

    def inherit(self, files: Iterable[int], rank: int, is_successor: bool) -> None:
        """Take over the complete snapshots of a worker that has ended.

        Args:
            files: file descriptors of the memory of its slots, which this method closes.
            rank: logical rank of that worker.
            is_successor: whether this worker is about to hold that rank.
        """
        for slot in filter(None, map(Slot.inherited, files)):
            owner = rank if slot.owner in (None, -1) else slot.owner
            if is_successor and owner == rank:
                slot.rename(-1)
                self.own.inherit(slot)
            else:
                slot.rename(owner)
                self.copies(owner).inherit(slot)

    def find(self, owner: int, step: int | None = None) -> Slot | None:
        """Return the complete snapshot of ``owner`` at ``step`` (default: the newest), None if there is none."""
        if owner == self.rank:
            return self.own.find(step)
        with self._lock:
            copies = self._copies.get(owner)
        return copies.find(step) if copies else None

    def drop_after(self, step: int) -> None:
        """Drop all snapshots of steps after ``step``, which a recovery has undone."""
        with self._lock:
            everything = [self.own, *self._copies.values()]
        for snapshots in everything:
            snapshots.drop_after(step)

    def forget_before(self, epoch: int) -> list[int]:
        """Free the peer copies of owners that have sent no copy in ``epoch`` or later. Return these owners."""
        with self._lock:
            left = [owner for owner, held in self._copies.items() if held.newest_epoch() < epoch]
            gone = [self._copies.pop(owner) for owner in left]
        for snapshots in gone:
            snapshots.close()
        return left

    def holdings(self) -> Holdings:
        with self._lock:
            copies = {owner: steps for owner, held in sorted(self._copies.items()) if (steps := held.steps())}
            whole = {owner: steps for owner in copies if (steps := self._copies[owner].steps(REPLICATED))}
        return Holdings(own=self.own.steps(), copies=copies, whole=whole)

    def nbytes(self) -> dict[str, int]:
        """Return host memory in bytes: {"own": ..., "copies": ...}."""
        with self._lock:
            return {"own": self.own.nbytes, "copies": sum(held.nbytes for held in self._copies.values())}

    def close(self) -> None:
        with self._lock:
            everything = [self.own, *self._copies.values()]
        for snapshots in everything:
            snapshots.close()


_REPLACED_END_S = 10.0
"""Maximum seconds to wait for the end of a transfer that a newer connection of the same owner replaces."""


class _HeldSnapshot(Held):
    """A section of a complete snapshot."""

    def __init__(self, slot: Slot, mark: Mark, section: str):
        self._slot, self._part = slot, slot.parts[section]
        self.mark, self.table, self.whose = mark, self._part.table, f"logical rank {mark.rank}"
        self.envelope, self.envelope_check = slot.meta, slot.meta_checksum

    @contextmanager
    def reading(self, channel: FramedChannel) -> Iterator[StateMemory]:
        yield self._part
        # The snapshot is not locked while it is read: its memory may have been reused for a newer one meanwhile.
        if (self._slot.status, self._slot.step, self._slot.epoch) != (Status.COMPLETE, *self.mark[1:]):
            raise Withdrawn


class _Arrival(Arrival):
    """A peer copy that is being received."""

    def __init__(self, holder: "SnapshotServer", channel: FramedChannel, mark: Mark):
        self._holder, self._copies = holder, holder.stock.copies(mark.rank)
        self._slot: Slot | None = None
        self.channel, self.mark = channel, mark
        self.ended = threading.Event()

    def prepare(self, table: Table, envelope: bytes) -> None:
        """Allocate memory for the copy."""
        self._slot = slot = self._copies.begin(self.mark.step, self.mark.epoch, {OWNED: table})
        slot.set_meta(envelope)
        self.memory = slot.parts[OWNED]

    def commit(self) -> bool:
        with self._holder.lock:
            is_wanted = self.mark.epoch > self._holder.closed and self._holder.arrivals.get(self.mark.rank) is self
            if is_wanted and self._slot is not None:
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


_FETCH_TRIES = 3
_NO_STEP = -2


def _physical_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


class SnapshotServer(CopyHolder):
    """One worker's end of the transport: sends snapshots to peers, receives peers' copies and serves fetches.

    It listens from its construction until :meth:`close`. At most one copy of each owner is received at a time. A newer
    connection of the same owner replaces an older one, because the sender of the older one has died or has lost its
    connection.

    Args:
        network: network that provides the streams; a string is a host name, at which to listen with TCP.
        token: secret shared by the workers of a run; connections that do not prove to know it are refused.
        patience_s: longest time without progress in a transfer, in seconds.
        max_bytes: largest peer copy accepted, in bytes; None: a quarter of this machine's memory.

    Attributes:
        address: address at which the server listens, in the format of its network.
        stock: the snapshots that this worker holds.
        arrivals: logical rank -> its copy that is being received; guarded by ``lock``.
        closed: number of the last epoch that is over.
        lock: guards what the threads of connections share: ``arrivals``, and decisions on ``closed``.
    """

    def __init__(
        self, network: Network | str, *, token: str = "", patience_s: float = 60.0, max_bytes: int | None = None
    ):
        self._network = TcpNetwork(network) if isinstance(network, str) else network
        self.stock = CopyStore()
        self._token, self._patience = token, patience_s
        self._max_bytes = max_bytes or _physical_memory() // 4
        self.arrivals: dict[int, _Arrival] = {}
        self._newest = self.closed = -1
        self.lock = threading.Lock()
        self._addresses: dict[int, str] = {}
        self._senders: dict[int, Sender] = {}
        self._fetching: tuple[int, transfer.OpenSource] | None = None
        self._ahead: tuple[int, Ahead] | None = None
        self._is_closed = False
        self._listener = serve(self._network, token, self, patience_s=patience_s, name="ft-snapshot")
        self.address = self._listener.address

    def place(self, addresses: Mapping[int, str]) -> None:
        """Set the addresses of the logical ranks. Connections to ranks with another address than before are closed."""
        with self.lock:
            self._addresses = dict(addresses)
            gone = [self._senders.pop(peer) for peer in list(self._senders) if peer not in addresses]
            senders = dict(self._senders)
        for sender in gone:
            sender.close()
        for peer, sender in senders.items():
            sender.move(addresses[peer])

    def send(self, peer: int, outgoing: Outgoing, ended: Callable[[Exception | None], None]) -> None:
        """Start to send ``outgoing`` to ``peer``, and return at once. Chunks are sent as soon as they are written.

        If the connection is lost, the transfer is repeated over a new one, a few times. ``ended`` is called once, from
        any thread: with None when the peer has verified and committed the copy, otherwise with the exception
        (:class:`ft.state.transfer.PeerLost` or :class:`ft.state.transfer.Cancelled`).
        """
        with self.lock:
            address = self._addresses.get(peer)
            if address is not None and peer not in self._senders:
                self._senders[peer] = Sender(self._network, peer, address, self._token, self._patience)
            sender = self._senders.get(peer)
        if sender is None:
            ended(PeerLost(f"nobody has said where logical rank {peer} is"))
            return
        sender.send(outgoing, ended)

    def disturb(self, how: Disturb) -> None:
        """Pass the chunks of the next snapshot to each peer through ``how``, for fault injection.

        Args:
            how: function (index of the chunk, number of chunks, pieces of data in which the chunk would be sent) ->
                pieces of data to send instead.
        """
        with self.lock:
            senders = list(self._senders.values())
        for sender in senders:
            sender.disturb(how)

    def fetch(self, holder: int, wanted: Mark, section: str, epoch: int, part: SlotPart) -> bytes:
        """Fill ``part`` with a section of a snapshot that another worker holds, and return the snapshot's ``meta``.

        Args:
            holder: logical rank that holds the snapshot.
            wanted: owner and step of the snapshot.
            section: the section.
            epoch: epoch in which the section is fetched.
            part: memory of the section.

        Raises:
            FallbackError: there is no such snapshot, it is damaged, or its layout differs from that of ``part``.
            PeerLost: the holder cannot be reached or stops answering.
            Cancelled: the epoch was cancelled.
        """
        address = self._addresses.get(holder)
        if address is None:
            raise PeerLost(f"nobody has said where logical rank {holder} is")
        whom = f"logical rank {holder} at {address}"
        for attempt in range(_FETCH_TRIES):
            time.sleep(0.05 * attempt)
            source = self._connection(address)
            self._fetching = (epoch, source)
            try:
                self._check_open(epoch)
                source.open(min(CONNECT_S, self._patience))
                envelope = source.state(wanted, part.table, section)
                source.receive(range(part.table.nbytes), part)
                return envelope
            except (transfer.Gone, transfer.Bad) as error:
                whose = f"logical rank {holder}'s copy of rank {wanted.rank}'s step {wanted.step}"
                raise FallbackError(f"{whose}: {error}") from error
            except transfer.SourceLost as error:
                self._check_open(epoch)
                if isinstance(error, transfer.SourceSilent):
                    raise PeerLost(f"{whom} {error}") from error
                problem = error
            finally:
                self._fetching = None
                source.close()
        raise PeerLost(f"cannot fetch from {whom}: {problem}") from problem

    def fetch_ahead(self, rank: int, epoch: int, holders: Mapping[int, str]) -> None:
        """Begin to fetch the newest copy of a logical rank, before it is known which one is restored.

        Args:
            rank: the logical rank, which this worker is about to take over.
            epoch: epoch in which it does; the end of this epoch ends the fetch.
            holders: logical rank of a worker that may have the copy -> address of its server.
        """
        connect_s = min(CONNECT_S, self._patience)
        self._ahead = epoch, Ahead(rank, holders, self._connection, self.stock.own, connect_s)

    def take_ahead(self, tables: Mapping[str, Table], step: int, holder: int) -> tuple[Slot, int] | None:
        """End :meth:`fetch_ahead`, and return what it has fetched: see :meth:`Ahead.take`."""
        ahead, self._ahead = self._ahead, None
        return None if ahead is None else ahead[1].take(tables, step, holder)

    def reach_itself(self, patience_s: float) -> None:
        """Ask this server, over its own address, for a snapshot that nobody has, and wait for the answer.

        Raises:
            ConnectionError: there is no answer within ``patience_s`` seconds, or not the right one.
        """
        source = transfer.OpenSource(self._network, self.address, self._token, patience_s)
        try:
            source.open(patience_s)
            source.envelope(Mark(step=_NO_STEP))
        except transfer.Gone:
            return
        except (transfer.SourceLost, transfer.Bad) as error:
            raise ConnectionError(f"{self.address} {error}") from error
        finally:
            source.close()
        raise ConnectionError(f"{self.address} gives out a snapshot that nobody has")

    def cancel(self, epoch: int) -> None:
        """Cancel the operations of ``epoch`` and of earlier epochs, and refuse new ones.

        Safe from any thread; returns at once.
        """
        with self.lock:
            self.closed = max(self.closed, epoch)
        for arrival in self._over():
            arrival.channel.shutdown()
        fetching, ahead = self._fetching, self._ahead
        if fetching is not None and fetching[0] <= epoch:
            fetching[1].cut("cancelled")
        if ahead is not None and ahead[0] <= epoch:
            ahead[1].cut()
        with self.lock:
            senders = list(self._senders.values())
        for sender in senders:
            sender.cancel(epoch)

    def quiesce(self) -> None:
        """After ``cancel``, wait until no thread of the transport writes into the store any more."""
        for arrival in self._over():
            arrival.ended.wait()

    def close(self) -> None:
        """End all threads and connections, and free the store."""
        with self.lock:
            if self._is_closed:
                return
            self._is_closed = True
        self.cancel(sys.maxsize)
        with self.lock:
            senders = list(self._senders.values())
        for sender in senders:
            sender.close()
        self._listener.close()
        self.stock.close()

    def find(self, mark: Mark, section: str) -> Held:
        slot = self.stock.find(mark.rank, None if mark.step == -1 else mark.step)
        if slot is None or section not in slot.parts or section not in (OWNED, REPLICATED):
            later = mark.rank == self.stock.rank and self.stock.own.is_coming(mark.step)
            raise NotHeld(f"this worker does not hold that snapshot (it holds {self.stock.holdings()})", later)
        return _HeldSnapshot(slot, Mark(mark.rank, slot.step, slot.epoch), section)

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

    def _connection(self, address: str) -> transfer.OpenSource:
        return transfer.OpenSource(self._network, address, self._token, self._patience)

    def _known_table(self, owner: int, encoded: bytes) -> Table:
        newest = self.stock.copies(owner).find()
        if newest is not None and newest.parts[OWNED].table.encoded == encoded:
            return newest.parts[OWNED].table
        try:
            table = Table.decode(encoded)
        except FallbackError as error:
            raise TransferRefused(str(error)) from error
        if table.nbytes > self._max_bytes:
            raise TransferRefused(f"a copy of {table.nbytes} bytes; at most {self._max_bytes} are taken here")
        return table

    def _admit(self, arrival: _Arrival) -> None:
        """Register a copy that is being received, and end an earlier one of the same owner that is not complete.

        Raises:
            TransferRefused: the epoch in which the copy was sent is over.
        """
        owner, epoch = arrival.mark.rank, arrival.mark.epoch
        with self.lock:
            if epoch <= self.closed or epoch < self._newest:
                raise TransferRefused(f"epoch {epoch} is over (closed: {self.closed}, newest: {self._newest})")
            self._newest = epoch
            before = self.arrivals.get(owner)
            self.arrivals[owner] = arrival
        if before is not None:
            before.channel.shutdown()
            if not before.ended.wait(_REPLACED_END_S):
                raise TransferRefused(f"an earlier transfer for rank {owner} does not end")

    def _over(self) -> list[_Arrival]:
        """Return the arrivals of closed epochs."""
        with self.lock:
            return [arrival for arrival in self.arrivals.values() if arrival.mark.epoch <= self.closed]

    def _check_open(self, epoch: int) -> None:
        if epoch <= self.closed:
            raise Cancelled(f"epoch {epoch} is over: nothing is fetched for it any more")
