"""Hot-swap's training loop: it snapshots every committed step, and recovers from every interruption in a new epoch."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ft.faults.worker import Injector
from ft.job.messages import Finish, Repair, Source, WorkerDone, WorkerFailed, WorkerResumed
from ft.protection.contract import Layer
from ft.protection.injection import plant_phases
from ft.protection.position import Position
from ft.protection.training_state import TrainingState
from ft.state.snapshot import Snapshots
from ft.systems.hot_swap.placing import Placing
from ft.systems.hot_swap.rebuilder import StageRebuilder
from ft.systems.hot_swap.recovery import recover
from ft.worker.acknowledged import send_until_acknowledged
from ft.worker.failures import failure, report_failure
from ft.worker.session import Session

_ASIDE = ("evaluate", "save")


class RecoveryManager(Layer):
    """Protects one training run on one worker.

    Args:
        session: this worker's place in the run.
        subject: model, optimizer and schedule.
        position: the trainer's own state.
        snapshots: snapshots of this worker, and peer copies that it holds.
        injector: planned faults.
        placing: placement of the peer copies.
        keeper: rebuilds pipeline stages that are lost with all their copies (CheckFree), or None.
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
    ):
        self.session, self.snapshots, self.shards = session, snapshots, subject.shards
        self._subject, self._position, self._injector, self._placing = subject, position, injector, placing
        self._keeper = keeper
        self.is_empty = session.joins
        self._untouched = not session.joins
        self._committed, self._tidied = 0, -1
        self._fence: dist.Work | None = None
        self._fence_group = dist.new_group(backend="gloo")
        self._fence_word = torch.zeros(1, dtype=torch.int32, device="cpu")
        plant_phases(injector, subject, lambda: self._committed + 1)
        session.progress.lag = lambda: snapshots.lag
        session.when_closed(snapshots.interrupt)

    @property
    def step(self) -> int:
        """Return the last committed step of this worker's live state."""
        return self._position.get()["step"]

    def run_with_recovery(self, work: Callable[[], Any]) -> Any:
        """Run ``work`` to its end; call it again after every recovery, after which it continues from the position.

        It returns on all workers or on none: a worker that is done waits for the others, because recovering their
        faults needs its help.
        """
        begun = False
        while True:
            try:
                if not begun:
                    begun = True
                    self._begin()
                self.at("between")
                result = work()
                self._finish()
                self.snapshots.close()
                return result
            except Exception as error:
                self.fails(error)
                recover(self)

    def committed(self) -> None:
        """Take the snapshot of the step that ``position`` now counts, when all work that belongs to it is done.

        No worker overwrites its last but one snapshot until every worker's last snapshot has reached its peers. The
        fence, an all-reduce started before the optimizer step, guarantees this. (To wait only for one's own peers, as
        in DEADPOOL, section VI-A, is not enough: a fast worker would drop the step that a slow dead worker needs.)
        """
        if self._fence is not None:
            self._fence.wait()
            self._fence = None
            self._forget_moved_copies()
        step = self.step
        if self._keeper is not None:
            self._keeper.committed(step)
        self._take(step)
        self.session.progress.committed(step)
        self.at("between")

    def at(self, phase: str) -> None:
        """Inject the faults that are planned at this point of the step; costs nothing if there are none."""
        if phase in _ASIDE:
            self.session.progress.aside(phase)
        self._injector.at(phase, self._committed + 1)

    def restore(self, order: Repair) -> dict[str, str]:
        """Put the state of the order's step in place on this worker and, collectively, the parameters on all workers.
        From the next snapshot on, copies go to the holders that the new seats require.

        Returns:
            the sources of the state: {"owned": "own" | "copy:RANK" | "rebuilt:RANK+RANK", "replicated": ...}.
        """
        self._subject.abandon_step()
        self._place()
        rank = str(self.session.rank)
        self.snapshots.held_by(order.copies.get(rank, self.snapshots.peers))
        as_committed = True
        if rank in order.rebuilt:
            self._untouched = False
            self.snapshots.begin_at(order.step, self.session.epoch)
            position, sources = self._keeper.rebuild(order.step, order.rebuilt[rank])
            self._subject.publish_parameters()
        else:
            position, sources = self._from_snapshots(order.step, order.sources[rank])
            self._subject.publish_parameters()
            if order.rebuilt:
                self._untouched = False  # during the rebuild: with CheckFree+ a lender changes some of its own state
                as_committed = self._keeper.lend(order, self.snapshots.restored_envelope.envelope)
        self._untouched = as_committed
        self.is_empty = False
        self._position.set(position)
        if self._keeper is not None:
            self._keeper.learn(order)
        self.snapshots.peers = self._placing.renew(order.copies)
        return sources

    def _from_snapshots(self, step: int, source: Source) -> tuple[dict[str, Any], dict[str, str]]:
        """Put the state of ``step`` in place; return (the trainer's position, the sources of the state)."""
        keep = self._untouched and self.step == step
        sources = self.snapshots.restore(
            self._subject.state(self._position.get()), step, source, keep_tensors=keep, epoch=self.session.epoch
        )
        return self._subject.apply_envelope(self.snapshots.restored_envelope), sources

    def resumes(self) -> None:
        """Start an epoch: snapshot the state to the peers of the epoch's seats, before any step."""
        session, self._fence = self.session, None
        session.link.send(WorkerResumed(session.worker, session.epoch, self.step))
        self._injector.update(session.fired)
        self._take(self.step)
        session.progress.begins(self.step)

    def _begin(self) -> None:
        if self.is_empty:
            recover(self)
            return
        self._place()
        self.resumes()

    def _place(self) -> None:
        self.snapshots.place({rank: seat.address for rank, seat in self.session.seats.items()})

    def _forget_moved_copies(self) -> None:
        """Drop copies whose owner now sends them elsewhere: every worker's first snapshot of the epoch is safe.

        Until then, these copies protect the run and are reported as held.
        """
        if self._tidied < self.session.epoch:
            self._tidied = self.session.epoch
            self.snapshots.forget_before(self.session.epoch)

    def _take(self, step: int) -> None:
        self.snapshots.take(self._subject.state(self._position.get()), step, self.session.epoch)
        self._untouched, self._committed = True, step
        self._injector.at("transfer", step)

    def update(self, step: Callable[[], Any]) -> Any:
        self._before_update()
        return step()

    def _before_update(self) -> None:
        with self.session.progress.at("wait", "snapshot"):
            self.snapshots.wait()
            if self._fence is not None:  # from an attempt at this step that DMR has undone
                self._fence.wait()
        self._fence = dist.all_reduce(self._fence_word, group=self._fence_group, async_op=True)
        self._untouched = False
        self.at("optimizer")

    def _finish(self) -> None:
        session = self.session
        session.progress.idles("done")
        with send_until_acknowledged(session.link, WorkerDone(session.worker, session.epoch, self.step)):
            session.orders.wait(Finish, session.epoch)

    def fails(self, error: Exception) -> None:
        """Report an error of this worker; errors that the end of the epoch has caused need no report."""
        report_failure(self.session, self.step, error)

    def failure(self, error: Exception) -> WorkerFailed:
        """Return the report of an error; its traceback goes into the worker's log."""
        return failure(self.session, self.step, error)
