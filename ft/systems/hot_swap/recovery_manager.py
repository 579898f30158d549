"""Hot-swap's training loop: it snapshots every committed step, and recovers from every interruption in a new epoch.

:class:`ft.systems.hot_swap.recovery.WorkerRecovery` decides on the order of the operations; this module carries them
out. An operation that may block or take long is a coroutine, because the simulation of the control plane
(``tests/simulation/control``) has a model of it that gives way to other workers. Here it blocks the training thread,
and raises ``EpochClosed`` as soon as the control plane closes the epoch.
"""

import os
import random
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ft.base import events
from ft.base.errors import FallbackError, UserError
from ft.faults.faults import Fault
from ft.faults.flip import BIT_FLIP
from ft.faults.worker import ChunkFilter, Injector, Reports, damage_checkpoint
from ft.job.messages import ASIDE, Repair
from ft.job.parts import ELSEWHERE, GroupReport, Holdings, Neighbours, Source
from ft.protection.contract import Layer
from ft.protection.injection import corrupt_tensor, make_injector, plant_phases
from ft.protection.position import Position
from ft.protection.training_state import TrainingState
from ft.state.groups.tree import Tree, tell
from ft.state.placement.assign import Holders, find_problems, place
from ft.state.snapshot import Snapshots
from ft.state.snapshot.buffers import SlotFile
from ft.state.snapshot.store import slowness
from ft.systems.hot_swap.recovery import WorkerRecovery
from ft.systems.hot_swap.redone import Tries
from ft.worker import protocol
from ft.worker.session import Session
from megatron import patches
from megatron.core import parallel_state

if TYPE_CHECKING:
    from ft.systems.checkfree.rebuilder import CheckFreeRebuilder


class Breakage:
    """Executes injected faults on this worker's state, snapshots and messages (``ft.faults.worker.Actions``)."""

    def __init__(
        self,
        session: Session,
        snapshots: Snapshots,
        subject: TrainingState,
        position: Position,
        newest_checkpoint: Callable[[], Path | None],
    ):
        self.session = session
        self._snapshots, self._subject, self._position = snapshots, subject, position
        self._newest_checkpoint = newest_checkpoint
        self._choice = random.Random(session.rank)

    def act(self, fault: Fault) -> None:
        """Execute ``fault``. If there is nothing to damage, only write a message to the worker's log."""
        try:
            _ACTS[fault.kind](self, fault)
        except FallbackError as missing:
            print(f"injected fault {fault.number} ({fault}) found nothing: {missing}", flush=True)

    def _drop(self, fault: Fault) -> None:
        self.session.groups.break_connection(self._choice)

    def _corrupt_snapshot(self, fault: Fault) -> None:
        copies = self._snapshots.holdings().copies
        for owner in [None] if fault.copies == "own" else list(copies):
            self._snapshots.corrupt(owner, byte=self._choice.randrange(1 << 20))

    def _forget_copies(self, fault: Fault) -> None:
        self._snapshots.forget_newest_copies()

    def _go_stale(self, fault: Fault) -> None:
        self._snapshots.relapse(self._subject.state(self._position.get()))

    def _corrupt_tensor(self, fault: Fault) -> None:
        corrupt_tensor(self._subject, fault)

    def _leave_step(self, fault: Fault) -> None:
        """Start a collective that no other rank starts. It is matched with the next collective of the other ranks, so
        that the last collective hangs.
        """
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        dist.all_reduce(torch.zeros(1, device=patches.platform().device), group=group, async_op=True)

    def _break_the_device(self, fault: Fault) -> None:
        if self.session.faulty_device is None:
            raise FallbackError("bits are flipped by DMR (--ft-dmr, --ft-dmr-plan), which is off")
        self.session.faulty_device(fault.number, fault.flip)

    def _disturb_frames(self, fault: Fault) -> None:
        self.session.server.disturb(ChunkFilter(fault.kind, fault.seconds))

    def _disturb_reports(self, fault: Fault) -> None:
        self.session.link.disturb = Reports(fault.kind, fault.seconds)

    def _damage_checkpoint(self, fault: Fault) -> None:
        newest = self._newest_checkpoint()
        file = None if newest is None else damage_checkpoint(newest, fault.kind)
        print(f"injected fault {fault.number} ({fault}): {file or 'there is no checkpoint'}", flush=True)


_FRAMES = ("lose-frame", "duplicate-frame", "reorder-frames", "delay-frames", "corrupt-frame")
_REPORTS = ("lose-reports", "duplicate-reports", "reorder-reports", "delay-reports")
_CHECKPOINTS = ("corrupt-checkpoint", "truncate-checkpoint", "remove-checkpoint")
_ACTS = {
    "drop": Breakage._drop,
    "corrupt-snapshot": Breakage._corrupt_snapshot,
    "stale-snapshot": Breakage._forget_copies,
    "stale-state": Breakage._go_stale,
    "corrupt-tensor": Breakage._corrupt_tensor,
    "out-of-step": Breakage._leave_step,
    BIT_FLIP: Breakage._break_the_device,
    **dict.fromkeys(_FRAMES, Breakage._disturb_frames),
    **dict.fromkeys(_REPORTS, Breakage._disturb_reports),
    **dict.fromkeys(_CHECKPOINTS, Breakage._damage_checkpoint),
}


class Placing:
    """Places peer copies.

    All workers compute the same placement from the epoch's seats and the previous placement; logical rank 0 reports the
    placement to the user.

    Args:
        k: number of copies of each state.
        strict: whether failure domains that cannot be respected at the start end the run.
    """

    def __init__(self, session: Session, subject: TrainingState, k: int, strict: bool = False):
        self._session, self._subject, self._k, self._strict = session, subject, k, strict
        self._training_nodes = int(os.environ.get("GROUP_WORLD_SIZE", "1"))
        self._reported: list[str] = []

    def begin(self) -> list[int]:
        """Return the holders of this worker's copies at the start of a run. For a worker that joins later, the holders
        are unknown until ``renew``.

        Raises:
            UserError: ``strict`` is set and the placement has problems. Only logical rank 0 raises it; its exit ends
                the run.
        """
        session, subject = self._session, self._subject
        about = {
            "dp_peers": {str(session.rank): subject.dp_peers},
            "shards": {str(session.rank): subject.shards},
            "complete": {str(session.rank): subject.copies_are_complete},
        }
        if session.joins:
            session.observe("layout", **about)
            return []
        holders = place(self._where(), subject.dp_groups, self._k)
        session.observe("layout", **about, copies={str(session.rank): holders[session.rank]})
        problems = self._problems(holders)
        if problems and self._strict:
            raise UserError(
                "--ft-snapshot-strict: peer copies cannot be placed as asked:\n  " + "\n  ".join(problems),
                "change --ft-snapshot-peers, the order of the ranks (--use-tp-pp-dp-mapping) or the nodes",
            )
        self._tell(holders, 0, problems)
        return holders[session.rank]

    def renew(self, before: Mapping[int, Sequence[int]]) -> list[int]:
        """Return the holders of this worker's copies in the session's epoch.

        Args:
            before: logical rank -> its holders up to now, from the repair order.
        """
        session = self._session
        known = {rank: list(held) for rank, held in before.items()}
        holders = place(self._where(), self._subject.dp_groups, self._k, known)
        mine = holders[session.rank]
        if known.get(session.rank) != mine:
            session.observe("layout", copies={str(session.rank): mine})
        moved = sum(holder not in known.get(owner, held) for owner, held in holders.items() for holder in held)
        self._tell(holders, moved, self._problems(holders))
        return mine

    def _where(self) -> dict[int, dict[str, str]]:
        return {rank: {"node": seat.node, **seat.domains} for rank, seat in self._session.seats.items()}

    def _problems(self, holders: Holders) -> list[str]:
        """Return the placement's problems. On a single node, return none unless ``strict``, because the risk is
        obvious.
        """
        if self._session.rank != 0 or (self._training_nodes == 1 and not self._strict):
            return []
        subject = self._subject
        incomplete = () if subject.copies_are_complete else holders.keys()
        return find_problems(self._where(), subject.dp_groups, self._k, holders, incomplete)

    def _tell(self, holders: Holders, moved: int, problems: list[str]) -> None:
        """Report the placement, on logical rank 0; print problems only if they have changed."""
        if self._session.rank != 0:
            return
        copies = {str(owner): held for owner, held in holders.items()}
        self._session.observe(events.COPIES_PLACED, copies=copies, moved=moved, problems=problems)
        for problem in problems if problems != self._reported else []:
            print(f"warning: peer copies: {problem}", flush=True)
        if self._reported and not problems:
            print("peer copies: every failure domain is respected again", flush=True)
        self._reported = problems


_SLOW_TRANSFERS = 5
"""Number of consecutive snapshot transfers longer than a step after which a warning is printed."""


class StepCopy:
    """The last snapshot of this worker, as a :class:`ft.protection.undo.SharedCopy`: a layer inside hot-swap undoes a
    step with it.
    """

    def __init__(self, snapshots: Snapshots, recovery: WorkerRecovery):
        self._snapshots, self._recovery = snapshots, recovery

    def is_current(self) -> bool:
        return self._recovery.is_untouched

    def wait(self) -> None:
        self._snapshots.wait_for_own()

    def write_back(self, sections: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        self._snapshots.write_back(sections)
        self._recovery.undoes_step()


class RecoveryManager(Layer):
    """Protects one training run on one worker.

    All workers have to construct it, after model and optimizer are built. The training loop has to call :meth:`update`
    instead of the optimizer's ``step``.

    Args:
        session: this worker's place in the run.
        chunks: ``DistributedDataParallel`` model chunks.
        optimizer: megatron-core's optimizer, from ``get_megatron_optimizer``.
        scheduler: an object with ``state_dict`` and ``load_state_dict``, or None.
        position: the trainer's remaining state: number of the committed step, data position and the like.
        peers: number of other workers, in different failure domains, that hold a copy of this worker's optimizer shard.
        strict: whether to end the run at the start if such workers cannot be found.
        newest_checkpoint: returns the folder of the newest complete checkpoint, which injected faults may damage, or
            None.
        rebuilder: factory of the object that rebuilds a pipeline stage lost with all copies (CheckFree); None: no
            stage is rebuilt.
        injector: planned faults, if a layer inside this one has them; its phases are in place already.
        close: called when all workers have done the last step, or None.
        estimated: called after a recovery in which a part of the state was estimated (CheckFree), or None.
        without_state: returns a position with the note that it comes without a state, because another replica has it;
            None: there are no other replicas.
        evict_stragglers: a standby replaces a rank whose own work takes persistently this many times as long as that of
            the ranks with the same work; None: a slow rank is named, but keeps its place.
        compares: whether to compare a step that is done again with its first try.

    Raises:
        UserError: a recovery could not restore all of the state; ``strict`` is set and peer copies cannot be placed as
            requested; or the model's stages cannot be rebuilt.
    """

    def __init__(
        self,
        session: Session,
        chunks: Sequence,
        optimizer: Any,
        scheduler: Any,
        position: Position,
        *,
        peers: int = 1,
        strict: bool = False,
        newest_checkpoint: Callable[[], Path | None] = lambda: None,
        rebuilder: "Callable[[Session, TrainingState], CheckFreeRebuilder] | None" = None,
        injector: Injector | None = None,
        close: Callable[[], None] | None = None,
        estimated: Callable[[], None] | None = None,
        without_state: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
        evict_stragglers: float | None = None,
        compares: bool = False,
    ):
        self.session, self._subject = session, TrainingState(chunks, optimizer, scheduler)
        session.role, self.shards = self._subject.role, self._subject.shards
        if evict_stragglers is not None:
            session.observe("layout", evict_stragglers=evict_stragglers)
        self._close, self._estimated, self._without_state = close, estimated, without_state
        self._keeper = None if rebuilder is None else rebuilder(session, self._subject)
        if self._keeper is not None:
            # A stage that was rebuilt before the checkpoint was written may have its own learning rate.
            self._keeper.begins(position.get()["step"])
            position = self._keeper.extended(position)
        self._position = position
        self._placing = Placing(session, self._subject, peers, strict)
        self.snapshots = Snapshots(
            session.server,
            rank=session.rank,
            peers=self._placing.begin(),
            replicas=self._subject.dp_peers,
            on_failure=session.suspect,
        )
        self._injector = self._make_injector(newest_checkpoint) if injector is None else injector
        self._tries = Tries(chunks) if compares else None
        self._recovery = WorkerRecovery(session, self)
        session.footprint = session.grown(self._subject.state(position.get()).sections())
        self._work: Callable[[], Any] = lambda: None
        self._committed = self._slow = 0
        self._taken_at = 0.0
        self._envelope: dict[str, Any] = {}
        self._fence_tree = Tree("FENCE")
        self._fence_word = torch.zeros(1, dtype=torch.int32, device="cpu")
        session.progress.lag = lambda: self.snapshots.lag
        session.progress.memory = lambda: SlotFile.changed
        session.when_closed(self.snapshots.interrupt)
        if self._tries is not None:
            session.when_closed(self._tries.closes)

    def _make_injector(self, newest_checkpoint: Callable[[], Path | None]) -> Injector:
        breakage = Breakage(self.session, self.snapshots, self._subject, self._position, newest_checkpoint)
        injector = make_injector(self.session, breakage)
        plant_phases(injector, self._subject, lambda: self.step + 1)
        return injector

    def step_copy(self) -> StepCopy:
        """Return the copy from which layers inside this one can undo a step."""
        return StepCopy(self.snapshots, self._recovery)

    # --- what the trainer calls --------------------------------------------------------------------------------------

    def run_with_recovery(self, work: Callable[[], Any]) -> Any:
        """Run ``work`` to its end; call it again after every recovery, after which it continues from the position."""
        self._work = work
        result = protocol.run(self._recovery.run())
        self.snapshots.close()
        if self._close is not None:
            self._close()
        return result

    def catching_up(self) -> None:
        self._recovery.replaces_state()

    def update(self, step: Callable[[], Any]) -> Any:
        protocol.run(self._recovery.before_update())
        result = step()
        if self._tries is not None:
            self._tries.updated(result)
        return result

    def committed(self) -> None:
        """Take the snapshot of the step that ``position`` has reached. All work of that step has to be done."""
        protocol.run(self._recovery.committed())
        if self._tries is not None and (found := self._tries.committed(self.step)):
            self.session.observe(events.STEP_DIFFERS, differences=found)

    def at(self, phase: str) -> None:
        """Inject the faults that are planned at this point of the step; without such faults the call costs no time."""
        if phase in ASIDE:
            self.session.progress.aside(phase)
        self.inject(phase)

    # --- what the recovery calls -------------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """Return the last committed step of the live state, as given by the trainer's position."""
        return self._position.get()["step"]

    async def train(self) -> Any:
        """Run the training loop from the position to its end, and return its result."""
        return self._work()

    def inject(self, phase: str) -> None:
        """Inject the faults that are planned at this point of the step or of the recovery."""
        # The transfer of a snapshot belongs to the committed step, all other phases to the step that follows it.
        self._injector.at(phase, self._committed + (phase != "transfer"))

    def group_reports(self) -> list[GroupReport]:
        """Return the reports of all process groups of this worker."""
        return self.session.groups.reports()

    def group_topology(self) -> str:
        """Return a digest of the names and members of all process groups."""
        return self.session.groups.topology()

    def drop_groups(self) -> None:
        """Release the connections of interrupted groups: no earlier operation can write into a buffer afterwards."""
        self.session.groups.drop()

    async def rebuild_groups(self, order: Repair) -> float:
        """Connect the groups that ``order`` names in the worker's epoch, and allow operations again.

        Returns:
            duration in seconds.
        """
        session = self.session
        seconds = session.groups.rebuild(
            order.rebuild, order.defer, session.prefix(), session.epoch, session.rendezvous()
        )
        session.groups.reopen(session.epoch)
        return seconds

    def start_fence(self) -> dist.Work:
        """Start an all-reduce over all ranks, and return its handle."""
        return self._fence_tree.start(self._fence_word, dist.ReduceOp.MAX)

    async def wait_for_fence(self, fence: dist.Work) -> None:
        """Wait until all ranks have started the all-reduce."""
        fence.wait()

    async def wait_for_device(self) -> None:
        """Wait until the device has finished all work that the training thread has started."""
        patches.platform().synchronize()

    def holdings(self) -> Holdings:
        """Return the steps of the complete snapshots on this worker."""
        return self.snapshots.holdings()

    def take_snapshot(self, step: int) -> None:
        """Start to copy the live state of ``step`` into host memory and to the peers."""
        self._watch_transfers(step)
        self.snapshots.take(self._subject.state(self._position.get()), step, self.session.epoch)
        self._committed = step

    def _watch_transfers(self, step: int) -> None:
        """Tell once if the transfers of snapshots have taken longer than a step, several times in a row."""
        now, began = time.monotonic(), self._taken_at
        self._taken_at = now
        stats = self.snapshots.stats
        if self._slow > _SLOW_TRANSFERS or stats is None or stats.step != step - 1:
            return
        said = slowness(stats, now - began)
        self._slow = self._slow + 1 if said else 0
        if self._slow == _SLOW_TRANSFERS:
            self._slow += 1
            print(f"warning: {said}", flush=True)

    async def wait_for_snapshot(self) -> None:
        """Wait until this worker and all peers have the last snapshot."""
        self.snapshots.wait()

    async def settle_snapshots(self) -> None:
        """Cancel all transfers of the closed epoch: afterwards the snapshots held on this worker do not change."""
        self.snapshots.settle()

    def forget_moved_copies(self) -> None:
        """Drop the peer copies of owners that now send their copies to other workers."""
        self.snapshots.forget_before(self.session.epoch)

    def abandon_step(self) -> None:
        """Drop the gradients and the pending operations of the interrupted step."""
        self._subject.abandon_step()

    def prepare_restore(self, order: Repair) -> None:
        """Adopt the addresses and the holders of snapshots of the new epoch."""
        self._place()
        self.snapshots.held_by(order.copies.get(self.session.rank, self.snapshots.peers))

    async def restore_snapshot(self, step: int, source: Source, keep: bool) -> tuple[dict[str, Any], dict[str, str]]:
        """Restore the state of ``step`` from a snapshot.

        Args:
            keep: whether the live tensors are still those of ``step``, so that they need not be written.

        Returns:
            (the trainer's position, the sources of the state: {"owned": "own" or "copy:RANK", "replicated": ...}).
        """
        sources = self.snapshots.restore(
            self._subject.state(self._position.get()), step, source, keep_tensors=keep, epoch=self.session.epoch
        )
        self._envelope = self.snapshots.restored_envelope.envelope
        return self._subject.apply(self.snapshots.restored_envelope), sources

    async def rebuild_stage(self, step: int, beside: Neighbours) -> tuple[dict[str, Any], dict[str, str]]:
        """Rebuild this rank's part of a lost pipeline stage (CheckFree) while the neighbour stages call ``lend_stage``.

        Args:
            beside: logical ranks of the previous and the following stage.
        """
        self.snapshots.begin_at(step, self.session.epoch)
        return self._keeper.rebuild(step, beside)

    async def take_weights(self, step: int, peer: int) -> tuple[dict[str, Any], dict[str, str]]:
        """Take the weights of ``step`` from the live model of a data-parallel peer, which calls ``lend_weights``."""
        self.snapshots.begin_at(step, self.session.epoch)
        position, sources, self._envelope = self._keeper.take_weights(step, peer)
        return position, sources

    async def lend_weights(self, order: Repair) -> None:
        """Send the weights of this rank's live model to the data-parallel peers that take them, if there are any."""
        self._keeper.lend_weights(order, self._envelope)

    async def forget_state(self, step: int, position_of: int) -> tuple[dict[str, Any], dict[str, str]]:
        """Give the state up, because this replica is going to fetch that of another replica. All ranks have to call it.

        Args:
            position_of: logical rank whose own snapshot has that position.

        Returns:
            a pair as ``restore_snapshot`` returns it, with the source ``ELSEWHERE``.
        """
        if self._without_state is None:
            raise FallbackError("there is no other replica whose state could be fetched")
        position: dict[str, Any] = {}
        if position_of == self.session.rank:
            position, _ = await self.restore_snapshot(step, Source(position_of, position_of), keep=False)
        else:
            self.snapshots.begin_at(step, self.session.epoch)
        told = tell(self._fence_tree, position)
        return self._without_state(told), dict.fromkeys(("owned", "replicated"), ELSEWHERE)

    async def publish_parameters(self, live: Collection[int] = ()) -> None:
        """Copy the optimizer's main parameters to the model parameters. All ranks have to call it.

        ``live``: logical ranks whose models have all of these parameters already.
        """
        self._subject.publish_parameters(live)

    async def lend_stage(self, order: Repair) -> bool:
        """Send this rank's state to the ranks that are rebuilt. Return whether this rank's state is still that of the
        step.
        """
        return self._keeper.lend(order, self._envelope)

    def continue_from(self, position: dict[str, Any], order: Repair) -> None:
        """Set the trainer's position, and choose the peers that the next snapshots are copied to."""
        self._position.set(position)
        if self._tries is not None:
            is_exact = not (order.rebuilt or order.lent) and order.position_of is None
            self._tries.recovers(position["step"], is_exact)
        if self._estimated is not None and (order.rebuilt or order.lent):
            self._estimated()
        if self._keeper is not None:
            self._keeper.learn(order)
        self.snapshots.peers = self._placing.renew(order.copies)

    def begins_epoch(self) -> None:
        """Adopt the list of already injected faults from the worker's epoch, before the first step of the epoch."""
        self.session.memory.end()
        self._place()
        self._injector.update(self.session.fired)

    def has_committed(self, step: int) -> None:
        """Do the work that follows when all ranks have committed ``step``."""
        if self._keeper is not None:
            self._keeper.committed(step)

    def _place(self) -> None:
        self.snapshots.place({rank: seat.address for rank, seat in self.session.seats.items()})
