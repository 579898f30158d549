"""Models of a worker's training loop, of its training state, and of the collectives between workers.

A live state is a tuple (owner, step, history), as in ``tests.simulation.control.snapshots``. ``Training`` has the
operations of ``ft.systems.hot_swap.recovery_manager`` that the recovery code asks for. The fence is a barrier that
begins before the optimizer step: a step that has passed it is committed. If a worker dies or the network fails, a
collective may complete for all members, for some of them, or for none.
"""

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from ft.base.errors import EpochClosed, RecoverableError, ReplaceNodeError
from ft.job import messages as m
from ft.job.control.recovery import PLUS
from ft.job.parts import GroupReport, Holdings, Neighbours, Source
from ft.net.codec import Numbers
from ft.worker import protocol
from tests.simulation.control.snapshots import Snapshots
from tests.simulation.engine import pause

if TYPE_CHECKING:
    from ft.systems.hot_swap.recovery import WorkerRecovery
    from tests.simulation.control.cluster import Cluster
    from tests.simulation.control.worker import Worker

# --- collectives ------------------------------------------------------------------------------------------------------

_LATENCY_S = (0.001, 0.02)
_NOTICED_S = (0.001, 0.05)


class Operation:
    """One collective.

    Attributes:
        epoch: epoch to which the collective belongs.
        key: identifier of the collective within its epoch.
        members: logical rank -> (worker, contribution) of those that have joined.
        ended: logical ranks for which the collective has completed.
        size: number of members; the collective begins when they have all joined.
        under_way: True while all members have joined and the collective is being executed.
    """

    __slots__ = ("ended", "epoch", "key", "members", "size", "under_way")

    def __init__(self, epoch: int, key: Any, size: int):
        self.epoch, self.key, self.size = epoch, key, size
        self.members: dict[int, tuple[Worker, Any]] = {}
        self.ended: set[int] = set()
        self.under_way = False


class Mesh:
    """All collectives in progress.

    Attributes:
        stuck: epochs in which a message was lost, so that no collective begins any more.
    """

    def __init__(self, cluster: "Cluster"):
        self._cluster = cluster
        self._pending: dict[tuple[int, Any], Operation] = {}
        self.stuck: set[int] = set()

    def join(self, worker: "Worker", key: Any, value: Any, size: int | None = None) -> Operation:
        """Let the worker join the collective ``key`` of its epoch with its contribution ``value``.

        The collective completes when ``size`` workers have joined; None: all workers of the epoch.
        """
        place = (worker.epoch, key)
        operation = self._pending.get(place)
        if operation is None:
            operation = self._pending[place] = Operation(*place, size or self._cluster.shape.world_size)
        self._cluster.checks.takes_part(operation, worker)
        operation.members[worker.rank] = (worker, value)
        self._look(operation)
        return operation

    def leave(self, worker: "Worker", operation: Operation) -> None:
        """Withdraw a worker that has stopped waiting. A collective not yet under way can then no longer complete."""
        if not operation.under_way:
            operation.members.pop(worker.rank, None)

    def lost(self, worker: "Worker", noticed: float) -> None:
        """Close the connections of a worker that has ended or left its epoch.

        Each peer observes a broken connection with probability ``noticed``. Collectives under way complete for some
        members and not for others.
        """
        rng = self._cluster.rng
        for operation in list(self._pending.values()):
            if operation.epoch != worker.epoch or operation.members.get(worker.rank, (None,))[0] is not worker:
                continue
            if operation.under_way:
                operation.ended |= {rank for rank in sorted(operation.members) if rng.random() < 0.5}
                self._end(operation)
            else:
                del operation.members[worker.rank]
        for peer in self._cluster.workers_of(worker.epoch):
            if peer is not worker and not peer.closed and rng.random() < noticed:
                self._cluster.time.after(rng.uniform(*_NOTICED_S), self._notice, peer, worker.epoch)

    def _notice(self, peer: "Worker", epoch: int) -> None:
        if peer.epoch == epoch and not peer.closed:
            peer.broken_epoch = epoch
            peer.poke()

    def look_again(self) -> None:
        """Check all collectives again, after connections are restored or a process resumes."""
        for operation in list(self._pending.values()):
            self._look(operation)

    def forget(self, epoch: int) -> None:
        """Drop the collectives of epochs before ``epoch``."""
        for place in [place for place in self._pending if place[0] < epoch]:
            del self._pending[place]

    def _look(self, operation: Operation) -> None:
        if operation.under_way or len(operation.members) < operation.size:
            return
        if operation.epoch in self.stuck or not self._is_connected(operation):
            return
        operation.under_way = True
        self._cluster.time.after(self._cluster.rng.uniform(*_LATENCY_S), self._complete, operation)

    def _is_connected(self, operation: Operation) -> bool:
        if any(worker.stopped for worker, _ in operation.members.values()):
            return False
        cut = self._cluster.cut_nodes()
        if not cut:
            return True
        nodes = {worker.node for worker, _ in operation.members.values()}
        return len(nodes) == 1 or not nodes & cut

    def _complete(self, operation: Operation) -> None:
        if self._pending.get((operation.epoch, operation.key)) is not operation:
            return
        if not self._is_connected(operation):
            operation.under_way = False
            return
        operation.ended = set(operation.members)
        self._end(operation)

    def _end(self, operation: Operation) -> None:
        """End a collective. Members that are not in ``ended`` now will never see the collective complete."""
        self._pending.pop((operation.epoch, operation.key), None)
        self._cluster.checks.operation_ended(operation)
        for rank in sorted(operation.members):
            operation.members[rank][0].poke()


# --- training ---------------------------------------------------------------------------------------------------------

ERRORS = {kind.__name__: kind for kind in (RecoverableError, ReplaceNodeError, ValueError)}
"""Exceptions that faults make a worker raise."""
_TORN = -1
"""History of a state that an optimizer step is changing."""


class Training:
    """The training script of one worker, from the end of its construction.

    Attributes:
        shards: names of the logical shards that only this rank owns.
        recovery: the production code of training and recoveries, which calls this model.
        inside: whether the worker takes part in the collectives of its epoch, or is about to.
        repaired_epoch: the last epoch for which the worker has restored its state.
        step: the trainer's position: the number of committed steps.
        owned: live state that only this rank has.
        replicated: live state that is replicated over the data-parallel ranks.
        snapshots: the worker's snapshots and peer copies.
        groups: process group -> [used, an operation was abandoned, number of collectives].
    """

    recovery: "WorkerRecovery"

    def __init__(self, worker: "Worker"):
        self._worker, self._cluster = worker, worker.cluster
        self.shards = [f"optimizer {worker.rank}"]
        self.inside, self.repaired_epoch = not worker.joins, -1
        self.step = 0
        self.owned = self.replicated = (-1, 0, 0)
        self.snapshots = Snapshots(worker, self)
        self.groups: dict[str, list[int | bool]] = {
            name: [False, False, 0] for name in worker.cluster.shape.groups_of(worker.rank)
        }
        self._fence: Operation | None = None

    def load(self) -> None:
        """Load the checkpoint from which the worker's epoch starts."""
        rank = self._worker.rank
        step, history = self._cluster.load(self._worker.epoch)
        self.step, self.owned = step, (rank, step, history)
        self.replicated = (self._cluster.shape.part_of(rank), step, history)

    # --- the training loop -------------------------------------------------------------------------------------------

    async def train(self) -> None:
        """Train to the last step: compute, all-reduce gradients, update behind the fence, take a snapshot."""
        worker, cluster, rng = self._worker, self._cluster, self._cluster.rng
        while self.step < cluster.habits.steps:
            await pause(rng.uniform(*cluster.habits.compute_s) * worker.slow)
            worker.slow = 1.0
            self._raise_defect()
            self._raise_poison()
            gradients = await self._collective("gradients", (self.step + 1, "gradients"))
            await self.recovery.before_update()
            await self._update(gradients)
            await self.recovery.committed()
            if self.step % cluster.habits.save_every == 0:
                worker.progress.aside("save")
                await pause(rng.uniform(*cluster.habits.save_s))
                cluster.saved(worker)
                worker.progress.begins(self.step)

    async def _update(self, gradients: "Operation") -> None:
        """Make the optimizer step; while it lasts, the live state is that of no step."""
        cluster, (rank, part) = self._cluster, (self.owned[0], self.replicated[0])
        cluster.checks.updates(self._worker)
        self.owned, self.replicated = (rank, self.step, _TORN), (part, self.step, _TORN)
        await pause(cluster.rng.uniform(*cluster.habits.update_s))
        self._raise_defect()
        self._raise_poison()
        self.step += 1
        history = cluster.checks.history_after(gradients, self._worker)
        self.owned, self.replicated = (rank, self.step, history), (part, self.step, history)

    def inject(self, phase: str) -> None:
        if phase in ("leave", "assemble", "rebuild", "restore", "resume"):
            self._raise_defect()

    def _raise_defect(self) -> None:
        worker = self._worker
        defect, worker.defect = worker.defect, None
        if defect is not None:
            raise defect

    def _raise_poison(self) -> None:
        worker = self._worker
        if worker.ails:
            raise RecoverableError("as in every step")
        poison = self._cluster.poisoned.get((worker.rank, self.step + 1))
        if poison == "kill":
            raise SystemExit(-11)
        if poison is not None:
            raise ERRORS[poison](f"the same in every step {self.step + 1}")

    # --- process groups ----------------------------------------------------------------------------------------------

    def _join(self, group: str, key: Any, value: Any = None, size: int | None = None) -> "Operation":
        """Start a collective without waiting for it.

        Raises:
            EpochClosed: the control plane has closed the epoch.
        """
        self._check_open()
        for name, about in self.groups.items():
            if name == "world" or group == "gradients":
                about[0], about[2] = True, about[2] + 1
        return self._cluster.mesh.join(self._worker, key, value or (self.owned, self.replicated), size)

    async def _collective(self, group: str, key: Any, value: Any = None, size: int | None = None) -> "Operation":
        operation = self._join(group, key, value, size)
        await self._wait_for(operation, group)
        return operation

    async def _wait_for(self, operation: "Operation", group: str) -> None:
        """Wait until the collective completes on this worker, or the epoch is closed.

        If a connection breaks in an open epoch, report this to the control plane, which decides what follows.

        Raises:
            EpochClosed: the control plane has closed the epoch.
            RecoverableError: a connection broke, and the control plane has not closed the epoch in time.
        """
        worker = self._worker
        worker.waiting = (group, self._cluster.time.now)
        try:
            while worker.rank not in operation.ended:
                if worker.closed or worker.broken_epoch == worker.epoch:
                    self._abandon(operation)
                    await self.suspect(group)
                await pause(None)
        finally:
            worker.waiting = None

    def _abandon(self, operation: "Operation") -> None:
        """Abandon a collective that has not completed on this worker when the epoch ends."""
        for about in self.groups.values():
            about[1] = True
        self._cluster.mesh.leave(self._worker, operation)

    async def suspect(self, what: str) -> None:
        """Report a broken connection, and raise an exception after the control plane's verdict.

        Raises:
            EpochClosed: the epoch is closed.
            RecoverableError: the control plane has not closed the epoch in time.
        """
        worker, error = self._worker, "Connection closed by peer"
        self._check_open()
        await protocol.suspect(worker, what, RuntimeError(error), self._cluster.timeouts.verdict_s)
        self._check_open()
        worker.broken_epoch = -1
        raise RecoverableError(f"group {what} failed: {error}")

    def _check_open(self) -> None:
        if self._worker.closed:
            raise EpochClosed(self._worker.closed_epoch, "as ordered")

    def group_reports(self) -> list[GroupReport]:
        members = self._cluster.shape.groups
        return [
            GroupReport(name, Numbers(members[name]), bool(used), bool(busy), int(count))
            for name, (used, busy, count) in self.groups.items()
        ]

    def group_topology(self) -> str:
        return ""

    def drop_groups(self) -> None:
        self._cluster.checks.leaves(self._worker)
        self._cluster.mesh.lost(self._worker, noticed=0.3)
        self.inside = False

    async def rebuild_groups(self, order: m.Repair) -> float:
        worker, cluster = self._worker, self._cluster
        began, self.inside = cluster.time.now, True
        await pause(cluster.rng.uniform(*cluster.habits.rebuild_s) * worker.slow)
        worker.slow = 1.0
        await self._wait_for(cluster.mesh.join(worker, "rebuild", None), "rebuild")
        for name in (*order.rebuild, *order.defer):
            if name in self.groups:
                self.groups[name] = [False, False, 0]
        return round(cluster.time.now - began, 3)

    def start_fence(self) -> "Operation":
        self._fence = self._join("fence", (self.step + 1, "fence"))
        return self._fence

    async def wait_for_fence(self, fence: "Operation") -> None:
        await self._wait_for(fence, "fence")
        self._fence = None

    async def wait_for_device(self) -> None:
        """Do nothing: a modelled collective ends on the host and on the device at once."""

    # --- snapshots ---------------------------------------------------------------------------------------------------

    def holdings(self) -> Holdings:
        return self.snapshots.stock.held()

    def take_snapshot(self, step: int) -> None:
        self._cluster.checks.takes_snapshot(self._worker, step)
        self.snapshots.take(step)

    async def wait_for_snapshot(self) -> None:
        await self.snapshots.wait()

    async def settle_snapshots(self) -> None:
        cluster = self._cluster
        copied_s = max(0.0, self.snapshots.copied_at - cluster.time.now)
        await pause(copied_s + cluster.rng.uniform(*cluster.habits.leave_s))
        if self._fence is not None and self._worker.rank not in self._fence.ended:
            self._abandon(self._fence)
        self._fence = None

    def forget_moved_copies(self) -> None:
        """Drop inherited copies; others never move, because their placement depends on logical ranks alone."""
        shape, stock = self._cluster.shape, self.snapshots.stock
        stock.copies = {o: held for o, held in stock.copies.items() if self._worker.rank in shape.copies_at(o)}

    # --- the training state ------------------------------------------------------------------------------------------

    def abandon_step(self) -> None:
        """Do nothing: the model keeps no data of an interrupted step."""

    def prepare_restore(self, order: m.Repair) -> None:
        """Do nothing: the model finds addresses in the epoch's seats."""

    async def restore_snapshot(self, step: int, source: Source, keep: bool) -> tuple[int, dict[str, str]]:
        value, how = await self.snapshots.restore(step, source, keep)
        if not keep or how["owned"] != "own":
            self.owned, self.replicated = value
        return step, how

    async def take_weights(self, step: int, peer: int) -> tuple[int, dict[str, str]]:
        self.snapshots.stock.drop_after(step)
        rank = self._worker.rank
        lent = await self._collective("weights", ("weights", peer, rank), (None, None), size=2)
        _, at, history = lent.members[peer][1][1]
        if at != step:
            self._cluster.checks.fail(f"rank {rank} takes weights of step {step} from rank {peer}, which is at {at}")
        self.owned, self.replicated = (rank, step, history), (self._cluster.shape.part_of(rank), step, history)
        return step, dict.fromkeys(("owned", "replicated"), f"rebuilt:{peer}")

    async def lend_weights(self, order: m.Repair) -> None:
        for rank in sorted(rank for rank, peer in order.lent.items() if peer == self._worker.rank):
            await self._collective("weights", ("weights", self._worker.rank, rank), size=2)

    async def forget_state(self, step: int, position_of: int) -> tuple[int, dict[str, str]]:
        raise AssertionError("the simulated run has no other replicas")

    async def publish_parameters(self, live: Collection[int] = ()) -> None:
        shape, rank = self._cluster.shape, self._worker.rank
        peers = shape.dp_peers(rank)
        if not set(peers) <= set(live):
            await self._collective("parameters", ("parameters", shape.part_of(rank)), size=len(peers))

    async def rebuild_stage(self, step: int, beside: Neighbours) -> tuple[int, dict[str, str]]:
        self.snapshots.stock.drop_after(step)
        lent = await self._collective("stages", "stages", (None, None))
        history, rank = lent.members[beside.there[0]][1][0][2], self._worker.rank
        self.owned, self.replicated = (rank, step, history), (self._cluster.shape.part_of(rank), step, history)
        return step, dict.fromkeys(("owned", "replicated"), f"rebuilt:{'+'.join(map(str, beside.there))}")

    async def lend_stage(self, order: m.Repair) -> bool:
        await self._collective("stages", "stages")
        return self._cluster.shape.checkfree != PLUS

    def continue_from(self, position: int, order: m.Repair) -> None:
        self.step = position
        self._cluster.checks.restored(self._worker)
        self.repaired_epoch = self._worker.epoch

    # --- the course of the run ---------------------------------------------------------------------------------------

    def begins_epoch(self) -> None:
        self._cluster.checks.begins_epoch(self._worker)

    def has_committed(self, step: int) -> None:
        """Do nothing: the model handles the end of a step in ``Checks.history_after``."""
