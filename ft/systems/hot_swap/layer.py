"""The protection of hot-swap (DEADPOOL); see :mod:`ft.protection.contract`."""

from collections.abc import Callable, Sequence
from typing import Any

from ft.protection.contract import Layer, Protection, Trainer
from ft.systems.hot_swap.protect import build
from ft.systems.hot_swap.rebuilder import StageRebuilder
from ft.worker.session import Session


class HotSwap(Protection):
    """Snapshot every step to host memory and to peers, and replace a dead worker by a standby."""

    joins_run = True

    def connected(self, session: Session | None) -> None:
        self._session = session
        self.is_given_state = session.joins

    def layer(self, trainer: Trainer, inner: Sequence[Layer]) -> Layer:
        flags = self.asked.flags
        inside = next((layer for layer in inner if getattr(layer, "is_inside", False)), None)
        manager = build(
            self._session,
            trainer.chunks,
            trainer.optimizer,
            trainer.scheduler,
            trainer.position if inside is None else inside.position,
            peers=flags.ft_snapshot_peers,
            strict=flags.ft_snapshot_strict,
            evict_stragglers=flags.ft_evict_stragglers,
            newest_checkpoint=trainer.newest_checkpoint,
            injector=None if inside is None else inside.injector,
            close=None if inside is None else inside.close,
            estimated=None if inside is None else inside.estimated,
            without_state=None if inside is None else inside.position.without_state,
            rebuilder=next((layer.rebuilder for layer in inner if isinstance(layer, RebuildsStages)), None),
            compares=inside is None,  # with replicas, a step that is done again may have others' gradients
        )
        for layer in inner:
            layer.gets_copy(manager.step_copy())
        return manager


class RebuildsStages(Layer):
    """A layer inside hot-swap that rebuilds lost pipeline stages. ``rebuilder`` makes the worker's rebuilder."""

    def __init__(self, rebuilder: Callable[[Session, Any], StageRebuilder]):
        self.rebuilder = rebuilder
