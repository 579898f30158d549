"""The network between workers: group operations of an epoch, which end for all members, for some, or for nobody."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ft.lab.simulate.control.cluster import Cluster
    from ft.lab.simulate.control.worker import Worker

_LATENCY_S = (0.001, 0.02)
_NOTICED_S = (0.001, 0.05)


class Operation:
    """One collective. ``members``: logical rank -> (worker, what it brings); ``ended``: ranks it has ended for."""

    __slots__ = ("ended", "epoch", "key", "members", "under_way")

    def __init__(self, epoch: int, key: Any):
        self.epoch, self.key = epoch, key
        self.members: dict[int, tuple[Worker, Any]] = {}
        self.ended: set[int] = set()
        self.under_way = False


class Mesh:
    """All operations under way. ``stuck``: epochs in which a message was lost for good."""

    def __init__(self, cluster: "Cluster"):
        self._cluster = cluster
        self._pending: dict[tuple[int, Any], Operation] = {}
        self.stuck: set[int] = set()

    def join(self, worker: "Worker", key: Any, value: Any) -> Operation:
        """The worker takes part in ``key`` of its epoch with ``value``; the operation ends when all do."""
        place = (worker.epoch, key)
        operation = self._pending.get(place)
        if operation is None:
            operation = self._pending[place] = Operation(*place)
        self._cluster.checks.takes_part(operation, worker)
        operation.members[worker.rank] = (worker, value)
        self._look(operation)
        return operation

    def leave(self, worker: "Worker", operation: Operation) -> None:
        """The worker has left the wait; from now on the operation can end for nobody who has not got its result yet."""
        if not operation.under_way:
            operation.members.pop(worker.rank, None)

    def lost(self, worker: "Worker", noticed: float) -> None:
        """The worker's connections have ended: each peer notices with probability ``noticed``, and operations under way
        end for some and not for others."""
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
        """Connections have come back, or a process goes on."""
        for operation in list(self._pending.values()):
            self._look(operation)

    def forget(self, epoch: int) -> None:
        """Operations of epochs long over are dropped."""
        for place in [place for place in self._pending if place[0] < epoch]:
            del self._pending[place]

    def _look(self, operation: Operation) -> None:
        if operation.under_way or len(operation.members) < self._cluster.shape.world_size:
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
        """What it has not ended for now it never will."""
        self._pending.pop((operation.epoch, operation.key), None)
        self._cluster.checks.operation_ended(operation)
        for rank in sorted(operation.members):
            operation.members[rank][0].poke()
