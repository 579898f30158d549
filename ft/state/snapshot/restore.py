"""Finds a valid snapshot for a restore: the rank's own, otherwise copies on peers (DEADPOOL, section VI-E).

A snapshot has two sections: ``owned`` (tensors that no other rank has; copies are held by a few other ranks) and
``replicated`` (tensors that all data-parallel peers have in their own snapshots).
"""

from collections.abc import Mapping, Sequence

from ft.base.errors import FallbackError
from ft.job.messages import Source
from ft.state.layout import Table
from ft.state.snapshot.buffers import Slot
from ft.state.snapshot.state import OWNED, REPLICATED
from ft.state.snapshot.transport import SnapshotServer
from ft.state.transfer.pull import Wanted
from ft.state.transfer.push import Cancelled, PeerLost


class Restorer:
    """Finds snapshots for one logical rank.

    Args:
        transport: this worker's end of the transport.
        rank: the logical rank.
        holders: see Attributes.
        replicas: see Attributes.

    Attributes:
        holders: ranks that hold copies of this rank's snapshots; tried in order after the source given to ``find``.
        replicas: ranks whose snapshots have the same replicated section; tried in order after that source.
    """

    def __init__(self, transport: SnapshotServer, rank: int, holders: Sequence[int], replicas: Sequence[int]):
        self._transport, self._own, self._rank = transport, transport.stock.own, rank
        self.holders, self.replicas = list(holders), list(replicas)

    def find(
        self, tables: Mapping[str, Table], step: int, source: Source, envelope_only: bool, epoch: int
    ) -> tuple[Slot | None, dict[str, str]]:
        """Find the snapshot of ``step`` from which this worker restores its state.

        The worker's own snapshot is used if its checksums are right. Otherwise the snapshot is copied from a peer into
        one of this worker's own slots, and its checksums are checked there.

        Args:
            tables: name of a section -> layout of its tensors.
            step: step of the snapshot.
            source: the ranks to try first, for each section.
            envelope_only: whether only the envelope of an own snapshot is needed, so that its tensors are not verified.
            epoch: epoch in which the restore takes place; a cancellation of this epoch ends the search.

        Returns:
            (slot with the snapshot, {section: where it came from}); (None, {}) if ``epoch`` was cancelled meanwhile.

        Raises:
            FallbackError: no source has a usable snapshot.
        """
        problems: list[str] = []
        if source.owned == self._rank:
            slot = self._sound_own(tables, step, envelope_only, problems)
            if slot is not None:
                return slot, {OWNED: "own", REPLICATED: "own"}
        slot = self._own.begin(step, epoch, tables)
        complete = False
        try:
            how = self._fetch_all(slot, step, source, epoch, problems)
            complete = True
        except Cancelled:
            return None, {}
        finally:
            if complete:
                self._own.commit(slot)
            else:
                self._own.drop(slot)
        return slot, how

    def _sound_own(
        self, tables: Mapping[str, Table], step: int, envelope_only: bool, problems: list[str]
    ) -> Slot | None:
        slot = self._own.find(step)
        if slot is None:
            problems.append(f"own snapshot: there is none (held: {self._own.steps()})")
            return None
        damage = slot.damage(envelope_only)
        if damage is None and any(slot.parts[name].table != table for name, table in tables.items()):
            damage = "its layout"
        if damage is not None:
            problems.append(f"own snapshot is damaged: {damage}")
            self._own.drop(slot)
            return None
        return slot

    def _fetch_all(self, slot: Slot, step: int, source: Source, epoch: int, problems: list[str]) -> dict[str, str]:
        holder, meta = self._fetch(slot, OWNED, source.owned, self._rank, step, epoch, problems)
        slot.set_meta(meta)
        how = {OWNED: f"copy:{holder}", REPLICATED: "none"}
        if slot.parts[REPLICATED].table.nbytes:
            holder, _ = self._fetch(slot, REPLICATED, source.replicated, None, step, epoch, problems)
            how[REPLICATED] = f"peer:{holder}"
        return how

    def _fetch(
        self, slot: Slot, section: str, first: int, owner: int | None, step: int, epoch: int, problems: list[str]
    ) -> tuple[int, bytes]:
        """Fetch one section from the first holder that has it, trying ``first`` and then the other holders.

        ``owner`` is the rank whose snapshot is fetched; None: each holder's own snapshot.
        """
        others = self.replicas if owner is None else self.holders
        holders = [holder for holder in dict.fromkeys((first, *others)) if holder != self._rank]
        for holder in holders:
            wanted = Wanted(step, rank=holder if owner is None else owner, section=section)
            try:
                return holder, self._transport.fetch(holder, wanted, epoch, slot.parts[section])
            except (FallbackError, PeerLost) as error:
                problems.append(str(error))
        raise FallbackError(
            f"logical rank {self._rank} finds no usable snapshot of step {step} ({section}): " + "; ".join(problems)
        )
