"""The objects that a replica manager works with on one rank, and the function that builds them."""

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from ft.base.errors import FtError
from ft.faults.hang.replicas import AGREEMENT
from ft.faults.worker import Injector
from ft.job.quorum import QuorumClient, Report
from ft.net.mpi import network_of
from ft.protection.contract import Layer
from ft.protection.injection import make_injector, plant_phases
from ft.protection.training_state import TrainingState
from ft.state.fetch import StateServer
from ft.state.groups.tree import Tree
from ft.systems.hsdp.agreement import Agreement
from ft.systems.hsdp.breakage import ReplicaBreakage
from ft.systems.hsdp.catch_up import CatchUp
from ft.systems.hsdp.exchange import Exchange
from ft.systems.hsdp.outside import Doing
from ft.systems.hsdp.place import ReplicaContext
from ft.systems.hsdp.position import ReplicaPosition
from ft.systems.hsdp.records import NoRecords, Records
from ft.systems.hsdp.ring import Ring, RingOptions
from ft.systems.hsdp.ring.options import CHUNK_BYTES
from ft.systems.hsdp.state import ReplicaState
from ft.systems.hsdp.work import Work
from ft.worker.session import Session
from megatron import patches
from megatron.core import parallel_state
from megatron.patches import instances, replicas


@dataclass
class Components:
    """The objects that a :class:`ft.systems.hsdp.replica_manager.ReplicaManager` uses on one rank.

    Attributes:
        session: this worker's connection to the run.
        place: the replica's place among the replicas, and its settings.
        subject: model, optimizer and schedule.
        position: the trainer's position, with the positions of all replicas' streams.
        state: the state that replicas fetch from each other.
        ring: connections to the same rank of the other replicas.
        exchange: exchange of gradients through the ring.
        work: the part of each step that this replica computes.
        server: serves the state to replicas that are behind.
        client: client of the quorum server, on the leader (rank 0); None elsewhere.
        agreement: agreement on a quorum among the ranks of the replica.
        catch_up: fetches the state of another replica.
        records: log of committed steps, on the leader.
        injector: planned faults.
        votes: tree over this replica's ranks, used only for their votes and digests.
        batch: samples that a replica takes in a step.
        save_interval: steps between checkpoints; None: no interval.
        per_token: whether megatron-core divides gradients by the number of tokens.
        doing: what the threads of this rank note for a look at a hang.
    """

    session: Session
    place: ReplicaContext
    subject: TrainingState
    position: ReplicaPosition
    state: ReplicaState
    ring: Ring
    exchange: Exchange
    work: Work
    server: StateServer
    client: QuorumClient | None
    agreement: Agreement
    catch_up: CatchUp
    records: Records | NoRecords
    injector: Injector
    votes: Tree
    batch: int
    save_interval: int | None
    per_token: bool
    doing: Doing = field(default_factory=Doing)

    @property
    def optimizer(self) -> Any:
        return self.subject.optimizer

    @property
    def device(self) -> torch.device:
        return patches.platform().device

    @property
    def is_last_stage(self) -> bool:
        return parallel_state.is_pipeline_last_stage(ignore_virtual=True)

    def finish(self, report: Report) -> None:
        """Report the end of the last step, so that the others no longer wait for this replica.

        The answer is awaited: if the server has just died, its successor has to learn that the run is complete, or it
        would wait for this replica when it counts the least number of members.
        """
        if self.client is not None:
            with contextlib.suppress(FtError):  # no server for ``Limits.away_s``, or none that takes this report
                self.client.ask(replace(report, finished=True)).result()

    def close(self) -> None:
        self.agreement.close()
        if self.client is not None:
            self.client.close()
        for each in (self.records, self.server, self.ring):
            each.close()


def build(
    session: Session,
    place: ReplicaContext,
    chunks: Sequence,
    optimizer: Any,
    scheduler: Any,
    position: ReplicaPosition,
    *,
    client: QuorumClient | None,
    work: Work,
    batch: int,
    save_interval: int | None = None,
    verifier: Layer | None = None,
) -> Components:
    """Build the objects of one rank, after model and optimizer are built. All ranks of the replica have to call it.

    Args:
        session: this worker's connection to the run.
        place: the replica's place among the replicas.
        chunks: ``DistributedDataParallel`` model chunks.
        optimizer: megatron-core's optimizer.
        scheduler: learning-rate scheduler.
        position: the trainer's position.
        client: client of the quorum server, on the leader; None elsewhere.
        work: the part of each step that this replica computes.
        batch: samples that a replica takes in a step.
        save_interval: steps between checkpoints.
        verifier: layer that verifies gradients before they leave the replica, if there is one.
    """
    subject = TrainingState(chunks, optimizer, scheduler)
    session.role = subject.role
    state = ReplicaState(subject, position)
    chunk_bytes = place.chunk_bytes or CHUNK_BYTES[patches.platform().name]
    ring = Ring(network_of(), place.token, RingOptions(chunk_bytes, place.chunks, streams=place.streams))
    server = StateServer(place.host, place.token, replica=place.replica, rank=session.rank)
    exchange = Exchange(
        ring,
        replicas.groups_of(subject.chunks),
        lambda: session.progress.at("aside", "the other replicas"),
        verifier,
        lambda: list(state.parameters().values()),
    )
    replicas.exchange_through(subject.chunks, exchange)
    per_token = _exchange_tokens(subject.chunks[0].config, exchange)
    is_leader = session.rank == 0
    votes = Tree("VOTES")
    row = {"ring": ring.address, "fetch": server.address}
    injector = make_injector(session, ReplicaBreakage(subject, ring, session))
    plant_phases(injector, subject, lambda: position.step + 1)
    return Components(
        session=session,
        place=place,
        subject=subject,
        position=position,
        state=state,
        ring=ring,
        exchange=exchange,
        work=work,
        server=server,
        client=client,
        agreement=Agreement(Tree(AGREEMENT), row),
        catch_up=CatchUp(session, place, state),
        records=Records(place.run_dir, Path(os.environ["FT_RUN_DIR"]), place.replica, batch)
        if is_leader
        else NoRecords(),
        injector=injector,
        votes=votes,
        batch=batch,
        save_interval=save_interval,
        per_token=per_token,
    )


def _exchange_tokens(config: Any, exchange: Exchange) -> bool:
    """Make megatron-core divide gradients by the number of tokens of all replicas. Return whether megatron-core divides
    by tokens.
    """
    if not config.calculate_per_token_loss:
        return False

    def finalize_over_replicas(finalize, model, num_tokens=None, **options):
        exchange.tokens = num_tokens
        return finalize(model, num_tokens, **options)

    instances.around(config, "finalize_model_grads_func", finalize_over_replicas)
    return True
