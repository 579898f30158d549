"""Construction of hot-swap's layer on one worker, from the training state, its snapshots and the planned faults.

A layer is an object whose methods the trainer calls at fixed points of a training step
(:class:`ft.protection.contract.Layer`).
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ft.base.errors import UserError
from ft.faults.worker import Injector
from ft.protection.injection import make_injector, plant_phases
from ft.protection.position import Position
from ft.protection.stack import Stack
from ft.protection.training_state import TrainingState
from ft.state.snapshot import Snapshots
from ft.systems.hot_swap.faults import Breakage
from ft.systems.hot_swap.placing import Placing
from ft.systems.hot_swap.rebuilder import StageRebuilder
from ft.systems.hot_swap.recovery_manager import RecoveryManager
from ft.systems.hot_swap.redone import Tries
from ft.worker.session import Session


def protect(session: Session, chunks: Sequence, optimizer: Any, scheduler: Any, position: Position, **options: Any):
    """Protect a user's own training loop: build the layer, and have it called before each optimizer step.

    The arguments, the result and the exceptions are those of :func:`build`. A step that is done again after a recovery
    is compared with its first try, and a difference is reported: the loop may keep something that is not restored.
    """
    manager = build(session, chunks, optimizer, scheduler, position, compares=True, **options)
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
    injector: Injector | None = None,
    close: Callable[[], None] | None = None,
    estimated: Callable[[], None] | None = None,
    without_state: Callable[[dict], dict] | None = None,
    evict_stragglers: float | None = None,
    compares: bool = False,
) -> RecoveryManager:
    """Return the layer that recovers a training run from faults.

    All workers have to call this function, after model and optimizer are built. The training loop has to call the
    layer's ``update`` instead of the optimizer's ``step``.

    Args:
        session: this worker's place in the run.
        chunks: ``DistributedDataParallel`` model chunks.
        optimizer: megatron-core's optimizer, from ``get_megatron_optimizer``.
        scheduler: an object with ``state_dict`` and ``load_state_dict``, or None.
        position: the trainer's remaining state: number of the committed step, data position and the like.
        peers: number of other workers, in different failure domains, that hold a copy of this worker's optimizer shard.
        strict: whether to end the run at the start if such workers cannot be found.
        newest_checkpoint: returns the folder of the newest complete checkpoint, which injected faults may damage, or
            None.
        rebuilder: factory of the object that rebuilds a pipeline stage lost with all copies (CheckFree); None: no
            stage is rebuilt.
        injector: planned faults, if a layer inside this one has them; its phases are in place already.
        close: called when all workers have done the last step.
        estimated: called after a recovery in which a part of the state was estimated (CheckFree).
        without_state: returns a position with the note that it comes without a state, because another replica has it;
            None: there are no other replicas.
        evict_stragglers: a standby replaces a rank whose own work takes persistently this many times as long as that of
            the ranks with the same work; None: a slow rank is named, but keeps its place.
        compares: whether to compare a step that is done again with its first try.

    Raises:
        UserError: a recovery could not restore all of the state; ``strict`` is set and peer copies cannot be placed as
            requested; or the model's stages cannot be rebuilt.
    """
    _refuse_position(position)
    subject = TrainingState(chunks, optimizer, scheduler)
    session.role = subject.role
    if evict_stragglers is not None:
        session.observe("layout", evict_stragglers=evict_stragglers)
    stage_rebuilder = None
    if rebuilder is not None:
        stage_rebuilder = rebuilder(session, subject)
        # A stage that was rebuilt before the checkpoint was written may have its own learning rate.
        stage_rebuilder.begins(position.get()["step"])
        position = stage_rebuilder.extended(position)
    placing = Placing(session, subject, peers, strict)
    snapshots = Snapshots(
        session.server,
        rank=session.rank,
        peers=placing.begin(),
        replicas=subject.dp_peers,
        on_failure=session.suspect,
    )
    if injector is None:
        injector = make_injector(session, Breakage(session, snapshots, subject, position, newest_checkpoint))
        plant_phases(injector, subject, lambda: position.get()["step"] + 1)
    tries = Tries(chunks) if compares else None
    return RecoveryManager(
        session,
        subject,
        position,
        snapshots,
        injector,
        placing,
        stage_rebuilder,
        close,
        estimated,
        without_state,
        tries,
    )


def _refuse_position(position: Any) -> None:
    lacks = [name for name in ("get", "set") if not hasattr(position, name)]
    if lacks or "step" not in position.get():
        what = f"has no method {' and '.join(lacks)}" if lacks else 'has no "step" in what get() returns'
        raise UserError(
            f"the position is a {type(position).__name__}, which {what}", "give an ft.StepCounter, or its like"
        )
