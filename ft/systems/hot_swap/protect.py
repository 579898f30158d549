"""Builds hot-swap's protection of one worker: what is protected, its snapshots, its planned faults."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ft.protection.injection import make_injector
from ft.protection.position import Position
from ft.protection.stack import Stack
from ft.protection.training_state import TrainingState
from ft.state.snapshot import Snapshots
from ft.systems.hot_swap.faults import Breakage
from ft.systems.hot_swap.placing import Placing
from ft.systems.hot_swap.rebuilder import StageRebuilder
from ft.systems.hot_swap.recovery_manager import RecoveryManager
from ft.worker.session import Session


def protect(session: Session, chunks: Sequence, optimizer: Any, scheduler: Any, position: Position, **options: Any):
    """Protect a training loop of one's own. Takes what :func:`build` takes, and returns what it returns."""
    manager = build(session, chunks, optimizer, scheduler, position, **options)
    Stack([manager]).protect(optimizer)
    return manager


def build(
    session: Session,
    chunks: Sequence,
    optimizer: Any,
    scheduler: Any,
    position: Position,
    *,
    peers: int = 1,
    strict: bool = False,
    newest_checkpoint: Callable[[], Path | None] = lambda: None,
    rebuilder: Callable[[Session, TrainingState], StageRebuilder] | None = None,
) -> RecoveryManager:
    """Return the layer that carries a training run through faults. Call it on all workers alike, after model and
    optimizer are built; the optimizer's step has to go through its ``update``.

    Args:
        session: this worker's place in the run.
        chunks: ``DistributedDataParallel`` model chunks.
        optimizer: megatron-core's, of ``get_megatron_optimizer``.
        scheduler: anything with ``state_dict`` and ``load_state_dict``, or None.
        position: the trainer's own state.
        peers: other workers that hold a copy of this worker's optimizer shard, in failure domains of their own.
        strict: where these cannot be had at the start the run ends.
        newest_checkpoint: the folder of the newest complete checkpoint, which injected faults may damage, or None.
        rebuilder: makes what rebuilds a pipeline stage that is lost everywhere (CheckFree); None: none is rebuilt.

    Raises:
        UserError: ``strict``, and peer copies cannot be placed as asked; or the model's stages cannot be rebuilt.
    """
    subject = TrainingState(chunks, optimizer, scheduler)
    keeper = None
    if rebuilder is not None:
        keeper = rebuilder(session, subject)
        keeper.begins(position.get()["step"])
        position = keeper.beside(position)
    placing = Placing(session, subject, peers, strict)
    snapshots = Snapshots(
        session.server,
        rank=session.rank,
        peers=placing.begin(),
        replicas=subject.dp_peers,
        on_failure=session.suspect,
    )
    injector = make_injector(session, Breakage(session, snapshots, subject, position, newest_checkpoint))
    return RecoveryManager(session, subject, position, snapshots, injector, placing, keeper)
