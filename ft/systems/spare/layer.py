"""The protection of SPARe, which divides the work among FT-HSDP's replicas; see :mod:`ft.protection.contract`."""

from collections.abc import Sequence
from typing import Any

from ft.protection.contract import Layer, Protection, Trainer
from ft.systems.hsdp.place import ReplicaContext
from ft.systems.hsdp.position import ReplicaPosition
from ft.systems.spare.stacked import StackedWork, StackLoaders, work


class StackedShards(Protection):
    """Place each shard type on several replicas; the remaining replicas compute the shards of a lost one (SPARe)."""

    def layer(self, trainer: Trainer, inner: Sequence[Layer]) -> Layer:
        return DividesByStacks()


class DividesByStacks(Layer):
    """Have the replicas compute stacks of shard types (``ft.systems.hsdp.layer.DividesWork``)."""

    def follow(self, loaders: Sequence[Any], batch: int) -> StackLoaders:
        return StackLoaders(loaders, batch)

    def work(
        self, place: ReplicaContext, position: ReplicaPosition, trainer: Trainer, follow: StackLoaders
    ) -> StackedWork:
        """Return the replica's work. Raise UserError if shard types cannot be placed with the given redundancy."""
        per_token = trainer.chunks[0].config.calculate_per_token_loss
        return work(place, position, lambda: trainer.extra, follow, per_token, trainer.reseed)
