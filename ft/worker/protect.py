"""Puts the parts of a worker's protection together: what is protected, its snapshots, its planned faults."""

from collections.abc import Sequence
from typing import Any

from ft.snapshot import Snapshots, peers_of
from ft.worker.faults import Breakage, make_injector
from ft.worker.guard import Guard
from ft.worker.position import Position
from ft.worker.session import Session
from ft.worker.subject import Subject


def protect(
    session: Session,
    chunks: Sequence,
    optimizer: Any,
    scheduler: Any,
    position: Position,
    *,
    peers: int = 1,
    checkpoints: str | None = None,
) -> Guard:
    """A guard for a training run of megatron-core; on all workers alike, after model and optimizer are built.

    Args:
        chunks: ``DistributedDataParallel`` model chunks. optimizer: ``get_megatron_optimizer``'s. scheduler: anything
            with ``state_dict`` and ``load_state_dict``, or None.
        position: the trainer's own state.
        peers: data-parallel neighbours that hold a copy of this worker's optimizer shard.
        checkpoints: the folder that the trainer saves to, which injected faults may damage.
    """
    subject = Subject(chunks, optimizer, scheduler)
    targets = peers_of(session.rank, subject.dp_peers, peers, session.world_size)
    snapshots = Snapshots(session.server, rank=session.rank, peers=targets, on_failure=session.suspect)
    session.observe(
        "layout",
        dp_peers={str(session.rank): subject.dp_peers},
        shards={str(session.rank): subject.shards},
        copies={str(session.rank): targets},
    )
    injector = make_injector(Breakage(session, snapshots, subject, position, checkpoints))
    return Guard(session, subject, position, snapshots, injector)
