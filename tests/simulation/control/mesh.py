"""Model of the collectives between the workers of a simulated cluster.

A collective has as members all workers of an epoch (a version of the map from logical ranks to workers) or those of one
process group. If a worker dies or the network fails, a collective may complete for all members, for some of them, or
for none.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.simulation.control.cluster import Cluster
    from tests.simulation.control.worker import Worker

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
