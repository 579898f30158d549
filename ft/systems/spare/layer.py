"""SPARe as a protection of a trainer: see :mod:`ft.protection.contract`. It divides the work of FT-HSDP's replicas."""

from collections.abc import Sequence
from typing import Any

from ft.protection.contract import Layer, Protection, Trainer
from ft.systems.hsdp.place import Place
from ft.systems.hsdp.position import ReplicaPosition
from ft.systems.spare.stacked import StackedWork, StackLoaders, work


class StackedShards(Protection):
    """Each shard type is hosted by several replicas; those that are left compute what a lost one would have."""

    def layer(self, trainer: Trainer, inner: Sequence[Layer]) -> Layer:
        return DividesByStacks()


class DividesByStacks(Layer):
    """Has the replicas compute stacks of shard types (``ft.systems.hsdp.layer.DividesWork``)."""

    def follow(self, loaders: Sequence[Any], batch: int) -> StackLoaders:
        return StackLoaders(loaders, batch)

    def work(self, place: Place, position: ReplicaPosition, trainer: Trainer, follow: StackLoaders) -> StackedWork:
        """Raises UserError where shard types cannot be placed with that redundancy."""
        per_token = trainer.chunks[0].config.calculate_per_token_loss
        return work(place, position, lambda: trainer.extra, follow, per_token, trainer.reseed)
