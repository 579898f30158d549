"""The objects that a replica manager works with on one rank; what a rank does with the ranks of other replicas at one
moment, for the search for the cause of a hang; and injected faults that act on its ring, its tensors or its device.

A leader asks for the quorum of a step; the same ranks of all replicas of a quorum connect a ring and reduce gradients
in it; a rank that is behind fetches its state, and the others hold their update back for that. Each of these is an
operation of a group whose name and numbers are the same in all replicas (:mod:`ft.faults.hang.replicas`). Faults that
act on any process, such as a kill, are injected elsewhere (:mod:`ft.faults`).
"""

import contextlib
import os
import sys
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ft.base.errors import FtError
from ft.faults.faults import Fault
from ft.faults.flip import BIT_FLIP
from ft.faults.hang.inspection import CONNECT, FETCH, QUORUM, SEND, SERVER, Operation, ReplicaGroup, channel
from ft.faults.hang.replicas import AGREEMENT, QUESTIONS
from ft.job.quorum import Quorum, QuorumClient, Report
from ft.job.quorum.client import QuestionState
from ft.net.streams import network_of
from ft.protection.contract import Layer
from ft.protection.injection import corrupt_tensor, make_injector, plant_phases
from ft.protection.training_state import TrainingState
from ft.state.fetch import StateServer
from ft.state.groups.tree import Tree
from ft.systems.hsdp import agreement, exchange
from ft.systems.hsdp.agreement import Agreement
from ft.systems.hsdp.catch_up import CatchUp, ReplicaState
from ft.systems.hsdp.commits import Records
from ft.systems.hsdp.exchange import Exchange
from ft.systems.hsdp.place import ReplicaContext
from ft.systems.hsdp.ring import Ring, RingOptions
from ft.systems.hsdp.ring.options import CHUNK_BYTES
from ft.systems.hsdp.ring.ring import THREAD, RingState
from ft.systems.hsdp.samples import ReplicaPosition
from ft.systems.hsdp.work import Work
from ft.worker.session import AcrossReplicas, Session
from megatron import patches
from megatron.patches import replicas, step_state
from megatron.patches.replace import wrap_attribute


class ReplicaBreakage:
    """Implementation of ``ft.faults.worker.Actions`` for a worker that keeps no snapshots."""

    def __init__(self, subject: TrainingState, ring: Ring, session: Session):
        self._subject, self._ring, self._session = subject, ring, session

    def act(self, fault: Fault) -> None:
        """Inject a fault. If a kind of fault has no target in this worker, only write a message to the worker's log."""
        if fault.kind == "drop":
            self._ring.cancel(f"injected: {fault}")
        elif fault.kind == "corrupt-tensor":
            corrupt_tensor(self._subject, fault)
        elif fault.kind == BIT_FLIP and self._session.faulty_device is not None:
            self._session.faulty_device(fault.number, fault.flip)
        else:
            print(f"injected fault {fault.number} ({fault}): a replica has nothing that it could break", flush=True)


_ANSWER_S = 0.15
"""Seconds to wait for the quorum server's answer; a server that runs answers within a millisecond."""
_SILENT_S = 1.0
"""Seconds without a heartbeat of the quorum server after which it counts as silent. They come four times a second."""
FETCHES, SERVES = "its own fetch", "fetches of others"
"""What the training thread can wait for besides the quorum and the ring."""
_REDUCTION = ("megatron/patches/replicas.py", "wait")
"""(end of the file's name, function) in which the training thread waits until the ring's thread has waited for a
reduction inside the replica."""


@dataclass
class InspectionNotes:
    """What the threads of a rank note for an inspection.

    Attributes:
        quorums: the last quorums that the ring was connected for.
        waits_for: what the training thread waits for: ``FETCHES`` (its own fetch of the state), ``SERVES`` (replicas
            that are behind and fetch the state), or "".
    """

    quorums: deque[Quorum] = field(default_factory=lambda: deque(maxlen=3))
    waits_for: str = ""

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Return a context in which the training thread waits for ``what``."""
        self.waits_for = what
        try:
            yield
        finally:
            self.waits_for = ""


@dataclass
class _Found:
    """The parts of an ``AcrossReplicas``, while they are collected."""

    replica: int
    rank: int
    operations: list[Operation] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    groups: dict[str, ReplicaGroup] = field(default_factory=dict)

    def meets(self, group: str, replicas: Iterable[int], count: int) -> None:
        """Add a group with the same rank of these replicas, and the number of operations that were started in it."""
        self.groups[group] = ReplicaGroup(tuple(sorted({self.replica, *replicas})), self.rank)
        self.counts[group] = count


def across_replicas(parts: "Components") -> AcrossReplicas:
    """Return what this rank does with ranks of other replicas. Called in the thread that receives orders."""
    found = _Found(parts.place.replica, parts.session.rank)
    waits_for = parts.exchange.waits_for
    has_asked = parts.agreement.is_awaited or waits_for == exchange.QUORUM
    client = parts.client
    if client is not None:
        _question(found, client.inspect(_ANSWER_S), has_asked)
    _ring(found, parts.ring.inspect(), parts.doing, waits_for == exchange.RING)
    _state(found, parts.doing)
    threads = {agreement.THREAD, f"ft-tree-{AGREEMENT}"} if has_asked else set()
    if waits_for == exchange.RING or _waits_for_reduction():
        threads.add(THREAD)
    return AcrossReplicas(tuple(found.operations), found.counts, found.groups, frozenset(threads))


def _question(found: _Found, view: QuestionState, is_awaited: bool) -> None:
    """Add the leader's question for a quorum. Its number is that of the quorum to be formed."""
    last = view.last
    received = 0 if last is None else last.number
    if view.asked is None:
        found.meets(QUESTIONS, (), received)
        return
    if view.waits is not None:
        others: Iterable[int] = view.waits
    elif view.silent_s > _SILENT_S:
        others = (SERVER,)
    else:
        others = () if last is None else last.members
    number = received + 1 if view.following is None else view.following
    found.meets(QUESTIONS, others, number)
    about, age_s = f"step {view.asked.next_step + 1}", round(view.asked_s, 3)
    found.operations.append(Operation(QUESTIONS, QUORUM, number, awaited=is_awaited, age_s=age_s, about=about))


def _ring(found: _Found, ring: RingState, doing: InspectionNotes, is_awaited: bool) -> None:
    """Add the ring's connecting or its last all-reduce. Their numbers count from the connecting on."""
    quorum = next((one for one in list(doing.quorums) if one.number == ring.number), None)
    if quorum is None or ring.members < 2:
        return
    joins, reduces = (f"{name}/{ring.number}/{found.rank}" for name in ("CONNECT", "RING"))
    found.meets(joins, quorum.members, 1)
    found.meets(reduces, quorum.members, ring.begun)
    age_s = round(ring.since_s, 3)
    if ring.connects:
        found.operations.append(Operation(joins, CONNECT, 1, awaited=is_awaited, age_s=age_s))
    elif ring.begun:
        waits = is_awaited and ring.is_busy
        done = not ring.is_busy
        found.operations.append(Operation(reduces, "all_reduce", ring.begun, done=done, awaited=waits, age_s=age_s))


def _state(found: _Found, doing: InspectionNotes) -> None:
    """Add the fetch of a state, on the rank that is behind and on those that hold their update back for it."""
    quorum = doing.quorums[-1] if doing.quorums else None
    if quorum is None:
        return
    group = f"STATE/{quorum.number}/{found.rank}"
    if found.replica in quorum.behind:
        found.meets(group, (), 0)
        found.counts |= {channel(group, SEND, replica): 1 for replica in quorum.healthy}
    if doing.waits_for == FETCHES:
        own = f"FETCH/{quorum.number}/{found.rank}/{found.replica}"
        found.meets(own, (), 1)
        found.operations.append(Operation(own, FETCH, 1))
    if doing.waits_for == SERVES:
        found.meets(group, (), 0)
        found.operations += [Operation(group, FETCH, 1, peer=replica) for replica in quorum.behind]


def _waits_for_reduction() -> bool:
    """Return whether the training thread waits for the ring's thread, which waits for a reduction in the replica."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    file, function = _REDUCTION
    return frame is not None and frame.f_code.co_name == function and frame.f_code.co_filename.endswith(file)


class Components:
    """The objects that a :class:`ft.systems.hsdp.replica_manager.ReplicaManager` uses on one rank.

    Construct it after model and optimizer are built, on all ranks of the replica.

    Args:
        verifier: layer that verifies gradients before they leave the replica, if there is one.

    Attributes:
        client: client of the quorum server, on the leader (rank 0); None elsewhere.
        records: log of committed steps, on the leader; None elsewhere.
        votes: tree over this replica's ranks, used only for their votes and digests.
        save_interval: steps between checkpoints; None: no interval.
        per_token: whether megatron-core divides gradients by the number of tokens.
        doing: what the threads of this rank note for an inspection of a hang.
    """

    def __init__(
        self,
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
    ):
        self.session, self.place, self.position, self.client, self.work = session, place, position, client, work
        self.batch, self.save_interval, self.doing = batch, save_interval, InspectionNotes()
        self.subject = TrainingState(chunks, optimizer, scheduler)
        session.role = self.subject.role
        self.state = ReplicaState(self.subject, position)
        chunk_bytes = place.chunk_bytes or CHUNK_BYTES[patches.platform().name]
        self.ring = Ring(network_of(), place.token, RingOptions(chunk_bytes, place.chunks, streams=place.streams))
        self.server = StateServer(place.host, place.token, replica=place.replica, rank=session.rank)
        self.exchange = Exchange(
            self.ring,
            replicas.groups_of(self.subject.chunks),
            lambda: session.progress.at("aside", "the other replicas"),
            verifier,
            lambda: list(self.state.parameters().values()),
        )
        replicas.exchange_through(self.subject.chunks, self.exchange)
        self.per_token = _exchange_at_end(self.subject.chunks, self.exchange)
        self.votes = Tree("VOTES")
        self.injector = make_injector(session, ReplicaBreakage(self.subject, self.ring, session))
        plant_phases(self.injector, self.subject, lambda: position.step + 1)
        self.agreement = Agreement(Tree(AGREEMENT), {"ring": self.ring.address, "fetch": self.server.address})
        self.catch_up = CatchUp(session, place, self.state)
        self.records: Records | None = None
        if session.rank == 0:
            self.records = Records(place.run_dir, Path(os.environ["FT_RUN_DIR"]), place.replica, batch)

    @property
    def optimizer(self) -> Any:
        return self.subject.optimizer

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
        if self.records is not None:
            self.records.close()
        self.server.close()
        self.ring.close()


def _exchange_at_end(chunks: Sequence, exchange: Exchange) -> bool:
    """Make megatron-core divide gradients by the number of tokens of all replicas. Return whether megatron-core divides
    by tokens.

    The gradients of torch's FSDP2 are exchanged then, too: it has no bucket groups, and has reduced this rank's shards
    of them in the backward pass.
    """
    config, is_fsdp2 = chunks[0].config, step_state.is_fsdp2(chunks[0])
    per_token = config.calculate_per_token_loss and not is_fsdp2  # core divides no gradients of FSDP2

    def finalize_over_replicas(finalize, model, num_tokens=None, **options):
        exchange.tokens = num_tokens
        if is_fsdp2:
            exchange.at_once(step_state.gradients(chunks))
        return finalize(model, num_tokens, **options)

    if per_token or is_fsdp2:
        wrap_attribute(config, "finalize_model_grads_func", finalize_over_replicas)
    return per_token
