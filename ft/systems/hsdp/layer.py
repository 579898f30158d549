"""The protection of FT-HSDP; see :mod:`ft.protection.contract`."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

from ft.job.quorum import QuorumClient
from ft.protection.contract import Asked, Layer, Protection, Trainer
from ft.systems.hsdp.components import build
from ft.systems.hsdp.data import Follower, Share
from ft.systems.hsdp.initial_assignment import initial_assignment
from ft.systems.hsdp.last_save import LastSave
from ft.systems.hsdp.place import ReplicaContext
from ft.systems.hsdp.position import KEY, Follow, ReplicaPosition
from ft.systems.hsdp.replica_manager import ReplicaManager
from ft.systems.hsdp.work import OwnStream, Work
from ft.worker.session import Session
from megatron.patches.manifest import WITH_REPLICAS


class DividesWork(Protocol):
    """A layer inside FT-HSDP that divides a step's samples among the replicas in another way (SPARe)."""

    def follow(self, loaders: Sequence[Any], batch: int) -> Follow:
        """Return the object that positions the data loaders at this replica's samples.

        Args:
            loaders: data loaders of this rank, one for each model chunk.
            batch: number of samples of a replica in a step.
        """

    def work(self, place: ReplicaContext, position: ReplicaPosition, trainer: Trainer, follow: Follow) -> Work:
        """Return the object that decides what the replica at ``place`` computes in each step.

        Args:
            place: the replica's place among the replicas.
            position: training position, with the sample positions of all replicas.
            trainer: the trainer.
            follow: the object that positions the data loaders.
        """


class Replicas(Protection):
    """Train the model by several replicas, each with its own world; if one fails, the others continue (FT-HSDP)."""

    features = frozenset({WITH_REPLICAS})
    joins_run = draws_weights = divides_steps = True

    def __init__(self, asked: Asked):
        super().__init__(asked)
        self._place = ReplicaContext.from_environment(asked.environment)
        self.is_given_state = self._place.comes_back
        self._client: QuorumClient | None = None
        self._block = 1

    def connected(self, session: Session | None) -> None:
        self._session = session
        if session.rank == 0 and not self.asked.flags.ft_hot_swap:
            self._client = self._place.announce()

    def share(self, extra: dict[str, Any], step: int, samples: int, block: int) -> Share:
        self._block = block
        return self._share(self._place, extra, step, samples)

    def _share(self, place: ReplicaContext, extra: dict[str, Any], step: int, samples: int) -> Share:
        assignment, positions = initial_assignment(place, extra, step, samples, self._block)
        if place.redundancy is not None:
            assignment, positions = assignment.leveled(positions, step)
        return Share(place.replica, assignment, positions)

    def layer(self, trainer: Trainer, inner: Sequence[Layer]) -> Layer:
        place, batch = self._place, trainer.batch // self._place.replicas
        divides = next((layer for layer in inner if hasattr(layer, "work") and hasattr(layer, "follow")), None)
        share = self._share(place, trainer.extra, trainer.step, trainer.samples)
        follow = Follower(trainer.loaders, place.replica) if divides is None else divides.follow(trainer.loaders, batch)
        position = ReplicaPosition(
            trainer.position, lambda: trainer.extra, place.replica, follow, share.assignment, dict(share.positions)
        )
        work = OwnStream(place) if divides is None else divides.work(place, position, trainer, follow)
        components = build(
            self._session,
            place,
            trainer.chunks,
            trainer.optimizer,
            trainer.scheduler,
            position,
            work=work,
            batch=batch,
            client=self._client,
            save_interval=trainer.save_interval,
            verifier=next((layer for layer in inner if layer.verifies), None),
        )

        def load_last() -> bool:
            """Load the newest checkpoint, if there is one, after every replica has lost its state."""
            trainer.extra.pop(KEY, None)  # the positions of the lost state
            is_loaded = trainer.load()
            begins = self._share(replace(place, comes_back=False), trainer.extra, trainer.step, trainer.samples)
            position.restart(begins.assignment, dict(begins.positions))
            work.restart()
            trainer.rewind()
            return is_loaded

        last_save = LastSave(trainer.is_saved, trainer.save) if trainer.saves else None
        is_inside = bool(self.asked.flags.ft_hot_swap)
        return ReplicaManager(components, load_last, lambda: trainer.rehearse(batch), last_save, is_inside)
