"""Hot-swap's training loop: it snapshots every committed step, and recovers from every interruption in a new epoch.

:class:`ft.systems.hot_swap.recovery.Recovery` decides on the order of the operations; this module carries them out.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ft.base import events
from ft.base.errors import FallbackError
from ft.faults.worker import Injector
from ft.job.messages import ASIDE, ELSEWHERE, GroupReport, Holdings, Neighbours, Repair, Source
from ft.protection.contract import Layer
from ft.protection.position import Position
from ft.protection.training_state import TrainingState
from ft.state.groups.tree import Operation, Tree, tell
from ft.state.snapshot import Snapshots
from ft.systems.hot_swap.operations import Operations
from ft.systems.hot_swap.placing import Placing
from ft.systems.hot_swap.rebuilder import StageRebuilder
from ft.systems.hot_swap.recovery import Recovery
from ft.systems.hot_swap.redone import Tries
from ft.systems.hot_swap.step_copy import StepCopy
from ft.worker import protocol
from ft.worker.session import Session
from megatron import patches


class RecoveryManager(Layer, Operations):
    """Protects one training run on one worker.

    Args:
        session: this worker's place in the run.
        subject: model, optimizer and schedule.
        position: the trainer's remaining state: number of the committed step, data position and the like.
        snapshots: snapshots of this worker, and peer copies that it holds.
        injector: planned faults.
        placing: placement of the peer copies.
        keeper: rebuilds pipeline stages that are lost with all their copies (CheckFree), or None.
        close: called when all workers have done the last step, or None.
        estimated: called after a recovery in which a part of the state was estimated (CheckFree), or None.
        without_state: returns a position with the note that it comes without a state; None: there are no other replicas
            that a state could be fetched from.
        tries: compares steps that are done again with their first tries, or None.
    """

    def __init__(
        self,
        session: Session,
        subject: TrainingState,
        position: Position,
        snapshots: Snapshots,
        injector: Injector,
        placing: Placing,
        keeper: StageRebuilder | None = None,
        close: Callable[[], None] | None = None,
        estimated: Callable[[], None] | None = None,
        without_state: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
        tries: Tries | None = None,
    ):
        self.session, self.snapshots, self.shards = session, snapshots, subject.shards
        self._subject, self._position, self._injector, self._placing = subject, position, injector, placing
        self._keeper, self._close, self._estimated = keeper, close, estimated
        self._without_state, self._tries = without_state, tries
        self._recovery = Recovery(session, self)
        self._work: Callable[[], Any] = lambda: None
        self._committed = 0
        self._envelope: dict[str, Any] = {}
        self._fence_tree = Tree("FENCE")
        self._fence_word = torch.zeros(1, dtype=torch.int32, device="cpu")
        session.progress.lag = lambda: snapshots.lag
        session.when_closed(snapshots.interrupt)
        if tries is not None:
            session.when_closed(tries.closes)

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
        return self._position.get()["step"]

    async def train(self) -> Any:
        return self._work()

    def inject(self, phase: str) -> None:
        # The transfer of a snapshot belongs to the committed step, all other phases to the step that follows it.
        self._injector.at(phase, self._committed + (phase != "transfer"))

    def group_reports(self) -> list[GroupReport]:
        return self.session.groups.reports()

    def group_topology(self) -> str:
        return self.session.groups.topology()

    def drop_groups(self) -> None:
        self.session.groups.drop()

    async def rebuild_groups(self, order: Repair) -> float:
        session = self.session
        seconds = session.groups.rebuild(
            order.rebuild, order.defer, session.prefix(), session.epoch, session.rendezvous()
        )
        session.groups.reopen(session.epoch)
        return seconds

    def start_fence(self) -> Operation:
        return self._fence_tree.start(self._fence_word, dist.ReduceOp.MAX)

    async def wait_for_fence(self, fence: Operation) -> None:
        fence.wait()

    async def wait_for_device(self) -> None:
        patches.platform().synchronize()

    def holdings(self) -> Holdings:
        return self.snapshots.holdings()

    def take_snapshot(self, step: int) -> None:
        self.snapshots.take(self._subject.state(self._position.get()), step, self.session.epoch)
        self._committed = step

    async def wait_for_snapshot(self) -> None:
        self.snapshots.wait()

    async def settle_snapshots(self) -> None:
        self.snapshots.settle()

    def forget_moved_copies(self) -> None:
        self.snapshots.forget_before(self.session.epoch)

    def prepare_restore(self, order: Repair) -> None:
        self._subject.abandon_step()
        self._place()
        self.snapshots.held_by(order.copies.get(self.session.rank, self.snapshots.peers))

    async def restore_snapshot(self, step: int, source: Source, keep: bool) -> tuple[dict[str, Any], dict[str, str]]:
        sources = self.snapshots.restore(
            self._subject.state(self._position.get()), step, source, keep_tensors=keep, epoch=self.session.epoch
        )
        self._envelope = self.snapshots.restored_envelope.envelope
        return self._subject.apply(self.snapshots.restored_envelope), sources

    async def rebuild_stage(self, step: int, beside: Neighbours) -> tuple[dict[str, Any], dict[str, str]]:
        self.snapshots.begin_at(step, self.session.epoch)
        return self._keeper.rebuild(step, beside)

    async def take_weights(self, step: int, peer: int) -> tuple[dict[str, Any], dict[str, str]]:
        self.snapshots.begin_at(step, self.session.epoch)
        position, sources, self._envelope = self._keeper.take_weights(step, peer)
        return position, sources

    async def lend_weights(self, order: Repair) -> None:
        self._keeper.lend_weights(order, self._envelope)

    async def forget_state(self, step: int, teller: int) -> tuple[dict[str, Any], dict[str, str]]:
        if self._without_state is None:
            raise FallbackError("there is no other replica whose state could be fetched")
        position: dict[str, Any] = {}
        if teller == self.session.rank:
            position, _ = await self.restore_snapshot(step, Source(teller, teller), keep=False)
        else:
            self.snapshots.begin_at(step, self.session.epoch)
        told = tell(self._fence_tree, position)
        return self._without_state(told), dict.fromkeys(("owned", "replicated"), ELSEWHERE)

    async def publish_parameters(self) -> None:
        self._subject.publish_parameters()

    async def lend_stage(self, order: Repair) -> bool:
        return self._keeper.lend(order, self._envelope)

    def continue_from(self, position: dict[str, Any], order: Repair) -> None:
        self._position.set(position)
        if self._tries is not None:
            is_exact = not (order.rebuilt or order.lent) and order.teller is None
            self._tries.recovers(position["step"], is_exact)
        if self._estimated is not None and (order.rebuilt or order.lent):
            self._estimated()
        if self._keeper is not None:
            self._keeper.learn(order)
        self.snapshots.peers = self._placing.renew(order.copies)

    def begins_epoch(self) -> None:
        self._place()
        self._injector.update(self.session.fired)

    def has_committed(self, step: int) -> None:
        if self._keeper is not None:
            self._keeper.committed(step)

    def _place(self) -> None:
        self.snapshots.place({rank: seat.address for rank, seat in self.session.seats.items()})
