"""Model of a worker's snapshots and of the peer copies that it holds (``ft.state.snapshot``).

After a failure, each worker restores the ordered step from its own snapshot or from its peers. A worker has two
alternating buffers for each rank. A state is a tuple (owner, step, history). ``owner`` is the logical rank or the part
of the model that the state belongs to. ``history`` is a hash over all steps that led to the state, with the epoch of
each step, so that a state restored from the wrong owner, or from a step that was rolled back, is recognized by its
value.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ft.base.errors import EpochClosed, FallbackError
from ft.job.parts import Holdings, Source
from tests.simulation.engine import pause

if TYPE_CHECKING:
    from tests.simulation.control.training import Training
    from tests.simulation.control.worker import Worker

# --- buffers ----------------------------------------------------------------------------------------------------------

EMPTY, STAGING, COMPLETE = range(3)


@dataclass(slots=True)
class Slot:
    """One buffer for one snapshot.

    Attributes:
        status: EMPTY, STAGING (being written) or COMPLETE.
        step: step of the snapshot.
        epoch: epoch in which the snapshot was taken.
        value: the states in the snapshot: (state of this rank alone, state replicated over data-parallel ranks).
        damaged: True if the checksums of the snapshot do not match.
        whole: of a copy: whether its second state may be used; a copy that a peer has sent lacks it.
    """

    status: int = EMPTY
    step: int = -1
    epoch: int = -1
    value: Any = None
    damaged: bool = False
    whole: bool = False


class PingPong:
    """Two buffers used alternately, by the rules of ``ft.state.snapshot.buffers.PingPong``."""

    def __init__(self):
        self.slots = [Slot(), Slot()]

    def begin(self, step: int, epoch: int, value: Any, own: bool = False) -> Slot:
        """Return a buffer for a new snapshot, in status STAGING; ``own``: first the one that already has this step."""
        slot = min(
            self.slots,
            key=lambda s: (not (own and s.step == step), s.status == COMPLETE, s.step <= step, s.step, s.epoch),
        )
        slot.status, slot.step, slot.epoch, slot.value, slot.damaged = STAGING, step, epoch, value, False
        slot.whole = False
        return slot

    def inherit(self, slot: Slot) -> None:
        """Take over a complete snapshot, in the place of the same one with fewer states, or of a free one."""
        same = [s for s in self.slots if s.status != EMPTY and (s.step, s.epoch) == (slot.step, slot.epoch)]
        less = [s for s in same if s.status == COMPLETE and slot.whole and not s.whole]
        if found := less or ([] if same else [s for s in self.slots if s.status == EMPTY]):
            self.slots[self.slots.index(found[0])] = slot

    def drop_after(self, step: int) -> None:
        """Drop the complete snapshots of steps after ``step``, which are rolled back."""
        for slot in self.slots:
            if slot.status == COMPLETE and slot.step > step:
                slot.status = EMPTY

    def find(self, step: int) -> Slot | None:
        """Return the complete snapshot of ``step`` from the latest epoch, None if there is none."""
        found = [s for s in self.slots if s.status == COMPLETE and s.step == step]
        return max(found, key=lambda s: s.epoch, default=None)

    def steps(self, whole: bool = False) -> list[int]:
        """Return the steps of the complete snapshots; with ``whole``, only of those that are whole copies."""
        return sorted({slot.step for slot in self.slots if slot.status == COMPLETE and whole <= slot.whole})


@dataclass(slots=True)
class CopyStore:
    """A worker's own snapshots, and the copies that the worker holds for other logical ranks.

    Attributes:
        own: the worker's own snapshots.
        copies: logical rank -> copies of that rank's snapshots.
    """

    own: PingPong = field(default_factory=PingPong)
    copies: dict[int, PingPong] = field(default_factory=dict)

    def of(self, owner: int) -> PingPong:
        if owner not in self.copies:
            self.copies[owner] = PingPong()
        return self.copies[owner]

    def drop_after(self, step: int) -> None:
        self.own.drop_after(step)
        for held in self.copies.values():
            held.drop_after(step)

    def inherit(self, left: "CopyStore", rank: int, is_successor: bool) -> None:
        """Take over the complete snapshots of an ended worker (``ft.state.snapshot.transport.CopyStore.inherit``)."""
        for owner, pair in {**left.copies, rank: left.own}.items():
            is_own = is_successor and owner == rank
            for slot in (slot for slot in pair.slots if slot.status == COMPLETE):
                slot.whole = not is_own and (owner == rank or slot.whole)
                (self.own if is_own else self.of(owner)).inherit(slot)

    def held(self) -> Holdings:
        """Return the steps of the worker's own snapshots and of the copies, and of those that are whole."""
        copies, whole = (
            {owner: steps for owner, pair in sorted(self.copies.items()) if (steps := pair.steps(only_whole))}
            for only_whole in (False, True)
        )
        return Holdings(self.own.steps(), copies, whole=whole)


# --- snapshots --------------------------------------------------------------------------------------------------------

_STALLED_S = 0.1
"""Virtual seconds after which a stalled transfer is checked again."""


class Snapshots:
    """The snapshots of one worker, and the peer copies that the worker holds for others.

    Attributes:
        stock: the snapshots and copies in the worker's memory.
        copied_at: true time in seconds at which the worker's last own snapshot is complete.
    """

    def __init__(self, worker: "Worker", training: "Training"):
        self._worker, self._training, self._cluster = worker, training, worker.cluster
        self.stock, self.copied_at = worker.stock, 0.0
        self._pending: set[int] = set()
        self._refused = False
        self._taken = (-1, -1)

    @property
    def is_safe(self) -> bool:
        """Return whether the last snapshot is complete on this worker and on all peers."""
        return self._cluster.time.now >= self.copied_at and not self._pending

    def take(self, step: int) -> None:
        """Copy the live state to host memory and send it to the peers, in the background."""
        worker, cluster = self._worker, self._cluster
        self._taken = place = (step, worker.epoch)
        value = (self._training.owned, self._training.replicated)
        slot = self.stock.own.begin(*place, value, own=True)
        copy_s = cluster.rng.uniform(*cluster.habits.copy_s)
        self.copied_at = cluster.time.now + copy_s
        cluster.time.after(copy_s, self._copied, slot, place)
        self._pending, self._refused = set(), False
        for peer in cluster.shape.copies_at(worker.rank):
            self._pending.add(peer)
            send_s = copy_s + cluster.rng.uniform(*cluster.habits.send_s)
            other = cluster.worker_in(worker.seats[peer].worker, worker)
            if other is not None and other.closed_epoch >= worker.epoch:
                other = None
            theirs = None if other is None else other.stock.of(worker.rank).begin(*place, value)
            cluster.time.after(send_s, self._sent, peer, other, theirs, place)

    async def wait(self) -> None:
        """Wait until the last snapshot is complete on this worker and on all peers that hold a copy.

        The training thread waits for snapshots only here, before the optimizer step.

        Raises:
            EpochClosed: the control plane has closed the epoch.
            RecoverableError: a copy could not be sent, and the control plane has not closed the epoch in time.
        """
        while not self.is_safe:
            if self._worker.closed or self._refused:
                await self._training.suspect("snapshot")
            await pause(None)

    def _copied(self, slot: Slot, place: tuple[int, int]) -> None:
        if self._worker.alive and slot.status == STAGING and (slot.step, slot.epoch) == place:
            slot.status = COMPLETE
        self._worker.poke()

    def _sent(self, peer: int, other: "Worker | None", slot: Slot | None, place: tuple[int, int]) -> None:
        """End the transfer of a copy: complete the peer's copy and acknowledge it to this worker, or do neither of the
        two.
        """
        worker, held = self._worker, False
        if worker.alive and (worker.stopped or (other is not None and other.alive and other.stopped)):
            # A stopped process does not reset the connection, so the transfer only stalls.
            self._cluster.time.after(_STALLED_S, self._sent, peer, other, slot, place)
            return
        if slot is not None and slot.status == STAGING and (slot.step, slot.epoch) == place:
            here = worker.alive and worker.closed_epoch < place[1]
            there = other.alive and other.closed_epoch < place[1]
            held = here and there and self._cluster.can_reach(worker.node, other.node)
            slot.status = COMPLETE if held else EMPTY
        if self._taken == place:
            self._pending -= {peer} if held else set()
            self._refused |= not held
            worker.poke()

    # --- restore -----------------------------------------------------------------------------------------------------

    async def restore(self, step: int, source: Source, keep: bool) -> tuple[Any, dict[str, str]]:
        """Find the snapshot of ``step``, and drop those of later steps (``ft.state.snapshot.store``).

        Args:
            step: step to restore.
            source: logical ranks from which the worker takes the state, by the control plane's order.
            keep: whether it is enough that the worker's own snapshot exists, because the live tensors need not be
                restored.

        Returns:
            (the states in the snapshot, part of the state ("owned" by this rank, "replicated" over data-parallel ranks)
            -> where it came from).

        Raises:
            FallbackError: no source has an intact snapshot.
            EpochClosed: the epoch was closed meanwhile.
        """
        slot = self.stock.own.find(step) if source.owned == self._worker.rank else None
        if slot is not None and slot.damaged and not keep:
            slot.status, slot = EMPTY, None
        how = {"owned": "own", "replicated": "own"}
        if slot is None:
            slot, how = await self._fetch(step, source)
        self.stock.drop_after(step)
        return slot.value, how

    async def _fetch(self, step: int, source: Source) -> tuple[Slot, dict[str, str]]:
        worker, cluster = self._worker, self._cluster
        staging = self.stock.own.begin(step, worker.epoch, None)
        await pause(cluster.rng.uniform(*cluster.habits.fetch_s))
        try:
            if worker.closed:
                raise EpochClosed(worker.closed_epoch, "as ordered")
            places = [(holder, worker.rank) for holder in (source.owned, *cluster.shape.copies_at(worker.rank))]
            holder, (owned, replicated) = self._first(places, step)
            how = {"owned": f"copy:{holder}", "replicated": "none"}
            if len(peers := cluster.shape.dp_peers(worker.rank)) > 1:
                whose = source.replicated if source.whose is None else source.whose
                places = [(source.replicated, whose), *((peer, peer) for peer in peers)]
                holder, (_, replicated) = self._first(places, step, shared=True)
                how["replicated"] = f"peer:{holder}"
        except (EpochClosed, FallbackError):
            staging.status = EMPTY
            raise
        staging.value, staging.status = (owned, replicated), COMPLETE
        return staging, how

    def _first(self, places: list[tuple[int, int]], step: int, shared: bool = False) -> tuple[int, Any]:
        """Return the first holder of ``places`` that has an intact snapshot of ``step``, and the snapshot's value.

        ``places``: (logical rank of the holder, logical rank whose snapshot it is); ``shared``: the state that
        data-parallel peers share is wanted, which most copies lack. Raise FallbackError if no rank has one.
        """
        worker = self._worker
        for holder, owner in places:
            other = self._cluster.worker_in(worker.seats[holder].worker, worker)
            if holder == owner == worker.rank or other is None or other.stopped:
                continue
            pair = other.stock.own if owner == holder else other.stock.copies.get(owner)
            slot = pair.find(step) if pair is not None else None
            if slot is not None and not slot.damaged and (slot.whole or owner == holder or not shared):
                return holder, slot.value
        raise FallbackError(f"logical rank {worker.rank} finds no usable snapshot of step {step}")
