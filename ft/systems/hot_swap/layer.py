"""The protection of hot-swap (DEADPOOL), for a trainer (:mod:`ft.protection.contract`) and for a loop of one's own."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ft.base.errors import UserError
from ft.protection.contract import Layer, Protection, Trainer
from ft.protection.position import Position
from ft.protection.stack import Stack
from ft.systems.hot_swap.recovery_manager import RecoveryManager
from ft.worker.session import Session

if TYPE_CHECKING:
    from ft.systems.checkfree.rebuilder import CheckFreeRebuilder


def protect(session: Session, chunks: Sequence, optimizer: Any, scheduler: Any, position: Position, **options: Any):
    """Protect a user's own training loop: build the layer, and have it called before each optimizer step.

    The arguments and the exceptions are those of :class:`ft.systems.hot_swap.recovery_manager.RecoveryManager`, which
    is the result. A step that is done again after a recovery is compared with its first try, and a difference is
    reported: the loop may keep something that is not restored.
    """
    lacks = [name for name in ("get", "set") if not hasattr(position, name)]
    if lacks or "step" not in position.get():
        what = f"has no method {' and '.join(lacks)}" if lacks else 'has no "step" in what get() returns'
        raise UserError(
            f"the position is a {type(position).__name__}, which {what}", "give an ft.StepCounter, or its like"
        )
    manager = RecoveryManager(session, chunks, optimizer, scheduler, position, compares=True, **options)
    Stack([manager]).protect(optimizer)
    return manager


class HotSwap(Protection):
    """Snapshot every step to host memory and to peers, and replace a dead worker by a standby."""

    joins_run = True

    def connected(self, session: Session | None) -> None:
        self._session = session
        self.is_given_state = session.joins

    def layer(self, trainer: Trainer, inner: Sequence[Layer]) -> Layer:
        flags = self.asked.flags
        inside = next((layer for layer in inner if getattr(layer, "is_inside", False)), None)
        manager = RecoveryManager(
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

    def __init__(self, rebuilder: "Callable[[Session, Any], CheckFreeRebuilder]"):
        self.rebuilder = rebuilder
