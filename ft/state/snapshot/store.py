"""``Snapshots``: takes snapshots of a worker's training state, replicates them to peers, and restores them.

A snapshot is taken after every step, in the background; peers hold copies of it before the next optimizer step changes
the tensors. A snapshot has two sections of tensors: ``owned``, which no other rank has and which is sent to peers, and
``replicated``, which all data-parallel peers have too. The rest is the envelope. A restore finds a valid snapshot: the
rank's own, otherwise copies on peers (DEADPOOL, section VI-E).
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from ft.base.errors import EpochClosed, FallbackError, RecoverableError
from ft.job.parts import Holdings, Source
from ft.net.framed import Mark
from ft.state.layout import Table, chunk_count
from ft.state.snapshot.buffers import Slot, SlotPart
from ft.state.snapshot.copier import Copier, CopyPlan, CopyProgress, device_of, tables_of, write_back
from ft.state.snapshot.state import OWNED, REPLICATED, RankState, Sections, pack_meta, unpack_meta
from ft.state.snapshot.transport import SnapshotServer
from ft.state.transfer import Cancelled, Outgoing, PeerLost


@dataclass
class TakeStats:
    """The cost of one snapshot. Times are in seconds, None while not known.

    Attributes:
        step: step of the snapshot.
        bytes_d2h: bytes copied into host memory on this worker.
        bytes_h2h: bytes sent to all peers together.
        take_s: duration of ``take``, on the training thread.
        copy_s: duration of the copy into host memory, in the background.
        transfer_s: time from ``take`` to the last peer's acknowledgement.
        wait_s: time for which ``wait`` blocked the training thread (exposed time).
    """

    step: int
    bytes_d2h: int
    bytes_h2h: int
    take_s: float
    copy_s: float | None = None
    transfer_s: float | None = None
    wait_s: float | None = None


def slowness(stats: TakeStats, step_s: float) -> str:
    """Return the sentence about a snapshot whose transfer has taken longer than a step, "" if it has not.

    Args:
        stats: cost of the snapshot.
        step_s: duration of the step in seconds.
    """
    if stats.transfer_s is None or stats.transfer_s <= step_s or not stats.bytes_h2h:
        return ""
    rate = stats.bytes_h2h / stats.transfer_s
    return (
        f"a snapshot is not sent within a step: {stats.bytes_h2h / 1e9:.2f} GB at {rate / 1e9:.2f} GB/s take "
        f"{stats.transfer_s:.2f} s, a step takes {step_s:.2f} s; training waits for the rest\n"
        "  fix: give ft run a faster --data-interface, or the trainer fewer --ft-snapshot-peers"
    )


class Snapshots:
    """Takes, replicates and restores snapshots (DEADPOOL, sections V-B, VI-A and VI-E).

    Only the training thread may call the methods, except ``interrupt``.

    Args:
        transport: this worker's end of the transport; its creator closes it.
        rank: logical rank of this worker.
        peers: logical ranks that hold copies of its snapshots (:func:`ft.state.placement.assign.place`).
        replicas: logical ranks that have the same replicated section; default: the peers.
        timeout_s: longest wait for the peers, in seconds.
        on_failure: function (what failed, the exception), called in ``wait`` before it raises. The function may block
            until the epoch is closed.

    Attributes:
        rank: logical rank of this worker.
        peers: the ranks that get the next copies; may be changed between a restore and the next ``take``.
        stats: cost of the last ``take``.
        restored_envelope: envelope and blobs of the last restored snapshot, as a state without tensors.
    """

    def __init__(
        self,
        transport: SnapshotServer,
        *,
        rank: int,
        peers: Sequence[int],
        replicas: Sequence[int] | None = None,
        timeout_s: float = 120.0,
        on_failure: Callable[[str, Exception], None] | None = None,
    ):
        self.rank, self.peers = rank, list(peers)
        self._transport, self._stock = transport, transport.stock
        self._stock.rank = rank
        self._timeout, self._on_failure = timeout_s, on_failure
        self._copier = Copier()
        self._holders, self._replicas = list(peers), list(peers if replicas is None else replicas)
        self._tables: tuple[list[Mapping[str, torch.Tensor]], dict[str, Table]] | None = None
        self._plans: dict[int, CopyPlan] = {}
        self._changed = threading.Condition()
        self._taken_at = 0.0
        self._epoch, self._closed, self._reason = -1, -1, ""
        self._taken = self._safe = 0
        self._progress: CopyProgress | None = None
        self._pending: dict[int, Exception | None] = {}
        self._failed: dict[int, Exception] = {}
        self._is_settled = False
        self.stats: TakeStats | None = None
        self.restored_envelope = RankState()

    @property
    def lag(self) -> int:
        """Return the number of steps between the last snapshot taken and the newest snapshot that all peers hold."""
        return self._taken - self._safe

    @property
    def nbytes(self) -> dict[str, int]:
        """Return host memory in bytes: {"own": both own buffers, "copies": copies held for other ranks}."""
        return self._stock.nbytes()

    def place(self, addresses: Mapping[int, str]) -> None:
        """Set the address of each logical rank's worker in this epoch."""
        self._transport.place(addresses)

    def held_by(self, holders: Sequence[int]) -> None:
        """Set the ranks that hold copies of this worker's snapshots; a restore fetches from them."""
        self._holders = list(holders)

    def forget_before(self, epoch: int) -> list[int]:
        """Free the copies held for owners that have sent no copy in ``epoch``, because other ranks hold theirs now.

        Return these owners. Call this only when peers hold every worker's first snapshot of ``epoch``: until then, a
        restore may need the old copies.
        """
        return self._stock.forget_before(epoch)

    def take(self, state: RankState, step: int, epoch: int) -> None:
        """Start to copy ``state`` into host memory and to send its owned section to the peers; return at once.

        The tensors must not change until ``wait`` has returned. An unfinished earlier snapshot is completed first.
        Snapshots of later steps are dropped: they were undone, because the state is that of an older checkpoint.
        """
        self.wait()
        began = time.perf_counter()
        if step < self._taken:
            self._stock.drop_after(step)
        sections = state.sections()
        slot = self._stock.own.begin(step, epoch, self._tables_of(sections), own=True)
        slot.set_meta(pack_meta({"step": step, "epoch": epoch, "rank": self.rank, **state.envelope}, state.blobs))
        plan = self._plan(slot, sections)
        part, meta = slot.parts[OWNED], slot.meta
        sent = (part.table.nbytes + len(meta)) * len(self.peers)
        with self._changed:
            self._epoch, self._taken, self._taken_at = epoch, step, began
            self._pending = dict.fromkeys(self.peers)
            self._failed = {}
            self._is_settled = False
            self.stats = stats = TakeStats(step, plan.nbytes + len(meta), sent, 0.0)
        self._progress = self._copier.start(plan, lambda error: self._copied(slot, error))
        outgoing = Outgoing(Mark(self.rank, step, epoch), part, meta, partial(_written, self._progress, part))
        for peer in self.peers:
            self._transport.send(peer, outgoing, partial(self._sent, peer, step, epoch))
        if not self.peers:
            self._safe = step
        stats.take_s = time.perf_counter() - began

    def wait(self) -> None:
        """Wait until this worker and all peers have the last snapshot. Call this before the optimizer step.

        Raises:
            EpochClosed: ``interrupt`` was called for the snapshot's epoch.
            PeerLost: a peer does not accept its copy, or did not acknowledge it within ``timeout_s``.
        """
        stats = self.stats
        if self._progress is None or stats is None:
            return
        began = time.perf_counter()
        self._progress.wait()
        if self._is_settled:  # the peers of its epoch are waited for no longer
            self._progress = None
            return
        stats.copy_s = self._progress.seconds
        with self._changed:
            ended = self._changed.wait_for(
                lambda: not self._pending or self._failed or self._closed >= self._epoch, self._timeout
            )
            pending, failed = list(self._pending), dict(self._failed)
        stats.wait_s = time.perf_counter() - began
        if self._closed >= self._epoch:
            raise EpochClosed(self._closed, self._reason)
        if self._progress.error is not None:
            raise self._progress.error
        if not ended:
            failed = {peer: PeerLost(f"no answer within {self._timeout:g} s") for peer in pending}
        for peer, error in failed.items():
            if self._on_failure is not None:
                self._on_failure(f"snapshot to rank {peer}", error)
            if self._closed >= self._epoch:
                raise EpochClosed(self._closed, self._reason) from error
            raise PeerLost(
                f"the snapshot of step {self._taken} is not safe with logical rank {peer}: {error}"
            ) from error
        self._progress = None

    def wait_for_own(self) -> None:
        """Wait until this worker has its own copy of the last snapshot.

        Raises:
            Exception: the state could not be copied.
        """
        if self._progress is not None:
            self._progress.wait()
            if self._progress.error is not None:
                raise self._progress.error

    def write_back(self, sections: Sections) -> None:
        """Copy the last snapshot into the live tensors, after it was verified by its checksums.

        Args:
            sections: name of a section -> name -> live tensor.

        Raises:
            RecoverableError: the snapshot is damaged; peers may have an intact copy.
        """
        self.wait_for_own()
        slot = self._stock.own.find(self._taken)
        damage = "all of it" if slot is None else slot.damage()
        if slot is None or damage is not None:
            raise RecoverableError(f"the snapshot of step {self._taken} is damaged: {damage}")
        write_back(slot, sections)

    def interrupt(self, epoch: int, reason: str) -> None:
        """Abort all operations of ``epoch``: a blocked ``wait`` or ``restore`` raises EpochClosed, and transfers end.

        Safe from any thread.
        """
        with self._changed:
            if epoch > self._closed:
                self._closed, self._reason = epoch, reason
            self._changed.notify_all()
        self._transport.cancel(epoch)

    def settle(self) -> None:
        """After an interruption, cancel all transfers of the epoch.

        Afterwards the snapshots held on this worker do not change until the next epoch. The copy into host memory goes
        on, and counts as held.
        """
        self._transport.cancel(self._epoch)
        with self._changed:
            self._pending = {}
        self._is_settled = True
        self._transport.quiesce()

    def holdings(self) -> Holdings:
        """Return the steps of the snapshots on this worker that are complete, or that its own copy will complete."""
        held = self._stock.holdings()
        if self._progress is not None and self._progress.error is None:
            held = replace(held, own=sorted({*held.own, self._taken}))
        return held

    def restore(
        self, state: RankState, step: int, source: Source, *, keep_tensors: bool = False, epoch: int | None = None
    ) -> dict[str, str]:
        """Write the snapshot of ``step`` into the live tensors of ``state``; ``restored_envelope`` holds the rest.

        The snapshot is verified by its checksums. If a source is unusable, the next one is tried: first this worker's
        own snapshot, then the copies on peers. Snapshots of later steps are dropped, because their steps are undone.

        Args:
            state: the live state.
            step: step of the snapshot.
            source: the ranks to fetch each section from first.
            keep_tensors: whether the live tensors are still those of ``step``, so that only the envelope is needed.
            epoch: epoch of the restore; ``interrupt`` for this epoch aborts the restore. Default: the epoch after that
                of the last snapshot.

        Returns:
            {"owned": "own" or "copy:RANK", "replicated": "own", "peer:RANK" or "none"}.

        Raises:
            FallbackError: no source is usable; the message gives the reason for each.
            EpochClosed: the restore was interrupted.
        """
        epoch = max(self._closed, self._epoch) + 1 if epoch is None else epoch
        self._leave_what_was(epoch, step)
        tables = self._tables_of(state.sections())
        slot, how = self._find(tables, step, source, keep_tensors, epoch)
        if slot is None:
            raise EpochClosed(max(self._closed, epoch), self._reason)
        if not keep_tensors or how["owned"] != "own":
            write_back(slot, state.sections())
        self.restored_envelope = unpack_meta(slot.meta)
        self._stock.drop_after(step)
        self._taken = self._safe = step
        return how

    def begin_at(self, step: int, epoch: int) -> None:
        """Continue from a live state of ``step`` that did not come from a snapshot; drop snapshots of later steps.

        Raises:
            EpochClosed: ``epoch`` was closed.
        """
        self._leave_what_was(epoch, step)
        self._transport.take_ahead({}, step, self.rank)
        self._stock.drop_after(step)
        self._taken = self._safe = step

    def corrupt(self, owner: int | None = None, byte: int = 0, step: int | None = None) -> int:
        """Flip one bit of a held snapshot, as failing memory would, for fault injection.

        Args:
            owner: logical rank of the snapshot's owner; default: this worker's rank.
            byte: index of the byte in the snapshot's owned section.
            step: step of the snapshot; default: the newest.

        Returns:
            step of the damaged snapshot.

        Raises:
            FallbackError: there is no such snapshot.
        """
        owner = self.rank if owner is None else owner
        slot = self._stock.find(owner, step)
        if slot is None or not slot.parts[OWNED].buffer.nbytes:
            raise FallbackError(f"no snapshot of rank {owner} to corrupt here: {self.holdings()}")
        view = slot.parts[OWNED].buffer.view
        view[byte % len(view)] ^= 1
        return slot.step

    def forget_newest_copies(self) -> list[int]:
        """Drop the newest copy held for each peer, for fault injection. Return the owners of these copies."""
        owners = list(self.holdings().copies)
        for owner in owners:
            copies = self._stock.copies(owner)
            if (newest := copies.find()) is not None:
                copies.drop(newest)
        return owners

    def relapse(self, state: RankState) -> int:
        """Write the owned section of the oldest own snapshot into the live tensors, for fault injection.

        Returns:
            step of that snapshot.

        Raises:
            FallbackError: there is no snapshot of an earlier step.
        """
        if self._progress is not None:
            self._progress.wait()
        steps = self._stock.own.steps()
        slot = self._stock.own.find(steps[0]) if len(steps) > 1 else None
        if slot is None:
            raise FallbackError(f"no earlier snapshot to go back to (held: {steps})")
        write_back(slot, {OWNED: state.owned})
        return steps[0]

    def close(self) -> None:
        """End the background thread. The buffers are freed with the transport."""
        self.settle()
        self._copier.close()
        self._plans.clear()

    def _leave_what_was(self, epoch: int, step: int) -> None:
        """Before the state of ``step`` is restored in ``epoch``, end all transfers and copies of the previous epoch.

        The last snapshot is completed if it is of ``step``, and abandoned otherwise.
        """
        if epoch <= self._closed:
            raise EpochClosed(self._closed, self._reason)
        if epoch > self._epoch:
            self.settle()
            if self._progress is not None and self._taken != step:
                self._progress.stop()
        if self._progress is not None:
            self._progress.wait()
        if epoch > self._epoch:
            self._progress = None

    def _find(
        self, tables: Mapping[str, Table], step: int, source: Source, envelope_only: bool, epoch: int
    ) -> tuple[Slot | None, dict[str, str]]:
        """Find the snapshot of ``step`` from which this worker restores its state.

        The worker's own snapshot is used if its checksums are right; those of the tensors are not looked at if
        ``envelope_only``. Otherwise the snapshot is copied from a peer into one of this worker's own slots, and its
        checksums are checked there.

        Returns:
            (slot with the snapshot, {section: where it came from}); (None, {}) if ``epoch`` was cancelled meanwhile.

        Raises:
            FallbackError: no source has a usable snapshot.
        """
        problems: list[str] = []
        fetched = self._transport.take_ahead(tables, step, source.owned)
        if source.owned == self.rank:
            slot = self._sound_own(tables, step, envelope_only, problems)
            if slot is not None:
                return slot, {OWNED: "own", REPLICATED: "own"}
        if fetched is not None:
            slot, holder = fetched
            return slot, {OWNED: f"copy:{holder}", REPLICATED: "none"}
        slot = self._stock.own.begin(step, epoch, tables)
        complete = False
        try:
            how = self._fetch_all(slot, step, source, epoch, problems)
            complete = True
        except Cancelled:
            return None, {}
        finally:
            if complete:
                self._stock.own.commit(slot)
            else:
                self._stock.own.drop(slot)
        return slot, how

    def _sound_own(
        self, tables: Mapping[str, Table], step: int, envelope_only: bool, problems: list[str]
    ) -> Slot | None:
        slot = self._stock.own.find(step)
        if slot is None:
            problems.append(f"own snapshot: there is none (held: {self._stock.own.steps()})")
            return None
        damage = slot.damage(envelope_only)
        if damage is None and any(slot.parts[name].table != table for name, table in tables.items()):
            damage = "its layout"
        if damage is None and unpack_meta(slot.meta).envelope.get("rank") != self.rank:
            damage = "it is that of another rank"
        if damage is not None:
            problems.append(f"own snapshot is damaged: {damage}")
            self._stock.own.drop(slot)
            return None
        return slot

    def _fetch_all(self, slot: Slot, step: int, source: Source, epoch: int, problems: list[str]) -> dict[str, str]:
        places = [(holder, self.rank) for holder in (source.owned, *self._holders)]
        holder, meta = self._fetch(slot, OWNED, places, step, epoch, problems)
        slot.set_meta(meta)
        how = {OWNED: f"copy:{holder}", REPLICATED: "none"}
        if slot.parts[REPLICATED].table.nbytes:
            whose = source.replicated if source.whose is None else source.whose
            places = [(source.replicated, whose), *((peer, peer) for peer in self._replicas)]
            holder, _ = self._fetch(slot, REPLICATED, places, step, epoch, problems)
            how[REPLICATED] = f"peer:{holder}"
        return how

    def _fetch(
        self, slot: Slot, section: str, places: list[tuple[int, int]], step: int, epoch: int, problems: list[str]
    ) -> tuple[int, bytes]:
        """Fetch a section of a snapshot from the first holder that has it, and return (holder, encoded ``meta``).

        ``places``: (logical rank of the holder, logical rank whose snapshot it is), in the order in which they are
        tried.
        """
        for holder, owner in dict.fromkeys(places):
            if (holder, owner) == (self.rank, self.rank):
                continue
            try:
                return holder, self._transport.fetch(holder, Mark(owner, step), section, epoch, slot.parts[section])
            except (FallbackError, PeerLost) as error:
                problems.append(str(error))
        raise FallbackError(
            f"logical rank {self.rank} finds no usable snapshot of step {step} ({section}): " + "; ".join(problems)
        )

    def _copied(self, slot: Slot, error: BaseException | None) -> None:
        if error is None:
            self._stock.own.commit(slot)
        else:
            self._stock.own.drop(slot)

    def _sent(self, peer: int, step: int, epoch: int, error: Exception | None) -> None:
        with self._changed:
            if (step, epoch) != (self._taken, self._epoch) or peer not in self._pending:
                return
            if error is not None:
                self._failed[peer] = error
            else:
                del self._pending[peer]
                if not self._pending and self.stats is not None:
                    self._safe = step
                    self.stats.transfer_s = time.perf_counter() - self._taken_at
            self._changed.notify_all()

    def _tables_of(self, sections: Sections) -> dict[str, Table]:
        """Return the layouts of the live tensors, from a cache if the mappings are the same objects as last time.

        Snapshots of tensors on a device are written into page-locked memory.
        """
        mappings = list(sections.values())
        if self._tables is None or not all(a is b for a, b in zip(self._tables[0], mappings, strict=True)):
            self._tables = (mappings, tables_of(sections))
            self._stock.own.pinned = device_of(sections) is not None
        return self._tables[1]

    def _plan(self, slot: Slot, sections: Sections) -> CopyPlan:
        plan = self._plans.get(id(slot))
        if plan is None or not plan.fits(slot, sections):
            plan = self._plans[id(slot)] = CopyPlan(slot, sections)
        return plan


def _written(progress: CopyProgress, part: SlotPart, stop: int) -> None:
    """Wait until the bytes of ``part`` before ``stop`` are copied. Raises RuntimeError if the copy fails."""
    progress.ready(part, chunk_count(stop))
