"""Puts the parts of a worker's protection together: what is protected, its snapshots, its planned faults."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ft.snapshot import Snapshots
from ft.worker.faults import Breakage, make_injector
from ft.worker.guard import Guard
from ft.worker.placing import Placing
from ft.worker.position import Position
from ft.worker.session import Session
from ft.worker.subject import Subject

if TYPE_CHECKING:
    from ft.checkfree.settings import Settings


def protect(
    session: Session,
    chunks: Sequence,
    optimizer: Any,
    scheduler: Any,
    position: Position,
    *,
    peers: int = 1,
    strict: bool = False,
    checkpoints: str | None = None,
    checkfree: "Settings | None" = None,
) -> Guard:
    """A guard for a training run of megatron-core; on all workers alike, after model and optimizer are built.

    Args:
        chunks: ``DistributedDataParallel`` model chunks. optimizer: ``get_megatron_optimizer``'s. scheduler: anything
            with ``state_dict`` and ``load_state_dict``, or None.
        position: the trainer's own state.
        peers: other workers that hold a copy of this worker's optimizer shard, in failure domains of their own.
        strict: where these cannot be had at the start the run ends.
        checkpoints: the folder that the trainer saves to, which injected faults may damage.
        checkfree: how a pipeline stage that is lost everywhere is rebuilt; None: it is not.

    Raises:
        UserError: ``strict``, and peer copies cannot be placed as asked; or the model's stages cannot be rebuilt.
    """
    subject = Subject(chunks, optimizer, scheduler)
    keeper = None
    if checkfree is not None:
        from ft.checkfree.keeper import KeptPosition, StageKeeper

        keeper = StageKeeper(session, subject, checkfree)
        keeper.begins(position.get()["step"])
        position = KeptPosition(position, keeper)
    placing = Placing(session, subject, peers, strict)
    snapshots = Snapshots(
        session.server,
        rank=session.rank,
        peers=placing.begin(),
        replicas=subject.dp_peers,
        on_failure=session.suspect,
    )
    injector = make_injector(session, Breakage(session, snapshots, subject, position, checkpoints))
    return Guard(session, subject, position, snapshots, injector, placing, keeper)
