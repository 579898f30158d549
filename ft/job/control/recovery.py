"""Decides which kind of recovery follows a fault, why, what it loses, and where the state comes from.

The control plane decides with :func:`decide`, and ``ft plan policy`` shows the same decisions. The function is
pure and total: it does no I/O, reads no clock, and answers every situation. The kinds of recovery are the rungs of
``LADDER``. Every rung that is possible in a situation makes an offer, which says what it loses. The first rung of the
ladder is taken whose offer is not worse in any respect than another one: a snapshot of an earlier step in this replica,
for example, gives way to the newest step in another replica.

:func:`plan_from_memory` looks into the memory of one replica's workers: copies first, then CheckFree, then the
checkpoint. CheckFree (section 4.2) rebuilds a pipeline stage whose state is lost from the two neighbouring stages. This
makes the loss jump once, while a warm restart from the persistent checkpoint repeats every step since that checkpoint.
Of a stage that is lost in part, the lost ranks take the weights of their data-parallel peers, which are exact, and
begin with new optimizer moments.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace

from ft.job.control import repairs
from ft.job.control.membership import place_ranks
from ft.job.control.state import ControlState, GridPosition, Worker
from ft.job.parts import Holdings, Neighbours, Source

IN_PLACE, STANDBY, COPY, REPLICA = "in place", "standby", "copy elsewhere", "another replica"
REORDER, CHECKFREE, CHECKPOINT, END = "reorder", "CheckFree", "checkpoint", "end"
LADDER = (IN_PLACE, STANDBY, COPY, REPLICA, REORDER, CHECKFREE, CHECKPOINT, END)
"""The rungs, from the one that is tried first.

- in place: every worker keeps its seat and its own snapshot; all repeat the interrupted step.
- standby: ready standbys take the seats of lost workers, with peer copies.
- copy elsewhere: a worker has to be started for a seat first, or one that kept its seat takes over a peer copy, because
  its own snapshot is unusable.
- another replica: the state of ranks comes from other replicas (hot-swap inside a replica); or, if the seats cannot be
  filled, the other replicas train on, and this one starts anew and fetches its state from them.
- reorder: as before, and the other groups compute this group's part of each batch (SPARe).
- CheckFree: a pipeline stage whose state is lost is rebuilt from others; a rank of a stage that is lost in part takes
  the weights of a data-parallel peer.
- checkpoint: all workers start anew from the newest verified checkpoint, or from the beginning if there is none.
- end: the run ends.
"""

EXACT, EVERY_SAMPLE, APPROXIMATE = "bit for bit", "every sample once", "approximate"
"""How the run continues: with the losses of a run without the fault; with every sample trained on once, but sums in
another order or batches of another size; with a state of which a part is an estimate.
"""
_EXACTNESS = (EXACT, EVERY_SAMPLE, APPROXIMATE)

_RELEASE, _JOIN, _START = ("control.drain_s",), ("control.assemble_s",), ("control.ready_s",)
_REPAIR = ("control.repair_s", "control.repair_s")  # restore the state, and begin the first step
_GO_ON = ("quorum.silent_s", "quorum.member_s")
_COME_BACK = ("quorum.minimum_s",)
WARM_RESTART = ("control.join_s",)
TABLES = ("control", "quorum")
"""The tables of limits: ``ft.job.control.timeouts.Timeouts`` and ``ft.job.quorum.limits.Limits``."""


@dataclass(frozen=True)
class Lost:
    """What a recovery loses.

    Attributes:
        steps: committed steps that are repeated; None: not known, because the age of the checkpoint is not.
        exactness: EXACT, EVERY_SAMPLE or APPROXIMATE.
        samples: samples that are never trained on. The position in the data is part of every state that a rung
            restores, so no rung gives up samples.
        late: share of each batch that is trained on later, when the replica is back.
        starts_anew: whether all workers of the job start anew.
        ended: whether the run ends.
    """

    steps: int | None = 0
    exactness: str = EXACT
    samples: int = 0
    late: float = 0.0
    starts_anew: bool = False
    ended: bool = False

    def is_less_than(self, other: "Lost") -> bool:
        """Return whether this is not more than ``other`` in any respect, and less in at least one."""
        mine, its = self._amounts(), other._amounts()
        return mine != its and all(a <= b for a, b in zip(mine, its, strict=True))

    def _amounts(self) -> tuple[float, ...]:
        steps = float("inf") if self.steps is None else float(self.steps)
        which = float(_EXACTNESS.index(self.exactness))
        return float(self.ended), float(self.starts_anew), float(self.samples), which, self.late, steps


def waits(seats: str) -> tuple[str, ...]:
    """Return the limits of a recovery in memory, one after the other, as ``table.field`` (``TABLES``).

    ``seats``: IN_PLACE if every worker keeps its seat, STANDBY if standbys are ready for all others, COPY if workers
    have to be started.
    """
    before = {IN_PLACE: (), STANDBY: _JOIN, COPY: (*_START, *_JOIN)}[seats]
    return (*_RELEASE, *before, *_REPAIR)


def waits_of_others(*, is_awaited: bool) -> tuple[str, ...]:
    """Return the limits of what the other replicas wait for when one leaves; ``is_awaited``: they are too few to train
    until it is back.
    """
    return (*_GO_ON, *_COME_BACK) if is_awaited else _GO_ON


def too_few(left: int, replicas: int, least: int) -> str:
    """Return why the ``left`` of ``replicas`` replicas are too few to train on, or "" if they are enough.

    Args:
        left: number of replicas that are left.
        replicas: number of replicas of the job.
        least: number of replicas that a step needs.
    """
    return f"{left} of {replicas} replicas are left, at least {least} must be" if left < least else ""


MIDDLE, PLUS = "middle", "plus"
"""The stages that CheckFree may rebuild: MIDDLE means stages with two neighbours; PLUS (CheckFree+) also the first and
the last.
"""

LOST = "both copies lost"
"""Beginning of the reason for a restart: no step has a snapshot of every logical rank."""
AGAINST = "CheckFree cannot help"
"""Beginning of the part of a reason that says why CheckFree is not used."""
LAST_RESORT = "what is left is the last persistent checkpoint"
"""End of that reason."""


@dataclass(frozen=True)
class HostMemory:
    """The training state in the host memory of the live workers.

    Attributes:
        ranks: all logical ranks.
        holdings: logical rank -> the snapshots in the memory of its worker.
        dp_peers: logical rank -> the ranks that hold the same part of the model, including the rank itself.
        complete: ranks whose peer copies hold all of their state.
        spoiled: steps that were tried and turned out to be unusable.
        unusable: logical rank -> the steps that it found unusable.
        unbuildable: steps at which a pipeline stage could not be rebuilt.
    """

    ranks: Collection[int]
    holdings: Mapping[int, Holdings]
    dp_peers: Mapping[int, list[int]]
    complete: Collection[int] = ()
    spoiled: Collection[int] = ()
    unusable: Mapping[int, Collection[int]] = field(default_factory=dict)
    unbuildable: Collection[int] = ()


@dataclass(frozen=True)
class Stages:
    """The pipeline stages, if CheckFree is enabled.

    Attributes:
        checkfree: MIDDLE, PLUS, or "" if CheckFree is disabled.
        places: logical rank -> its position in the grid.
        rebuilt: stage -> step at which it was last rebuilt. Its state of exactly that step is not original and may be
            rebuilt again.
    """

    checkfree: str = ""
    places: Mapping[int, GridPosition] = field(default_factory=dict)
    rebuilt: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class RecoveryPlan:
    """The chosen source of state.

    Attributes:
        name: COPY (own snapshots and peer copies; the seats to fill decide of which rung such a recovery is), REPLICA
            (another replica), CHECKFREE or CHECKPOINT.
        step: step to restore, or None for a restart.
        reason: why, for people; for a restart, why neither copies nor CheckFree are possible.
        sources: logical rank -> its source, for all ranks that are neither in ``rebuilt`` nor in ``lent``.
        rebuilt: logical rank -> the neighbours from whose transformer blocks it is rebuilt.
        lent: logical rank -> the data-parallel peer whose weights it takes.
        teller: logical rank from which all ranks get the position of ``step`` if they fetch the state (REPLICA).
    """

    name: str
    step: int | None
    reason: str
    sources: Mapping[int, Source] = field(default_factory=dict)
    rebuilt: Mapping[int, Neighbours] = field(default_factory=dict)
    lent: Mapping[int, int] = field(default_factory=dict)
    teller: int | None = None


def plan_from_memory(memory: HostMemory, stages: Stages) -> RecoveryPlan:
    """Return the first source of state that is possible.

    Copies of an earlier step are preferred to a rebuild at a later step, because they cost only the repeated steps.
    With CheckFree+, a rebuild that was interrupted at this same step is repeated: it also changes the neighbour that
    holds the second copy of the embedding or the output head, so snapshots of the two stages may come from before and
    after the rebuild.
    """
    step, found, why = repairs.choose(memory.ranks, memory.holdings, memory.dp_peers, memory.spoiled, memory.complete)
    if step is not None:
        if stages.checkfree == PLUS and step in stages.rebuilt.values():
            plan = _rebuild(step, memory, stages, again=True)
            if plan.name == CHECKFREE:
                return plan
        return RecoveryPlan(COPY, step, f"step {step} is the newest that every logical rank has a source of", found)
    lost = f"{LOST}: {why}"
    if not stages.checkfree:
        return RecoveryPlan(CHECKPOINT, None, lost)
    against = ""
    for step in repairs.steps_held(memory.holdings):
        for again in (True, False) if stages.checkfree == PLUS else (False,):
            plan = _rebuild(step, memory, stages, again=again)
            if plan.name == CHECKFREE:
                return plan
        against = against or plan.reason
    against = against or "there is no stage to rebuild from"
    return RecoveryPlan(CHECKPOINT, None, f"{lost}; {AGAINST}: {against}; {LAST_RESORT}")


def plan_fetch(memory: HostMemory, why: str) -> RecoveryPlan | None:
    """Return the plan that all ranks fetch their state from another replica, which none of them is asked for here.

    Until then, all ranks need the same position. It is that of the newest sound snapshot that a worker has of its own.
    None: no worker has one; then nothing is left of this replica that would be worth keeping.
    """
    told = [
        (step, -rank)
        for rank, held in memory.holdings.items()
        for step in held.own
        if step not in memory.unusable.get(rank, ())
    ]
    if not told:
        return None
    step, teller = max(told)
    return RecoveryPlan(REPLICA, step, f"{why}; this replica takes the state of another one", teller=-teller)


def _rebuild(step: int, memory: HostMemory, stages: Stages, *, again: bool) -> RecoveryPlan:
    """Plan to rebuild lost stages with CheckFree at ``step``, or to load the checkpoint, with the reason for that.

    ``again``: whether stages that were already rebuilt at this step are rebuilt again.
    """
    if step in memory.unbuildable:
        return RecoveryPlan(CHECKPOINT, None, f"at step {step} the neighbours' blocks turned out unusable")
    if unknown := sorted(rank for rank in memory.ranks if rank not in stages.places):
        return RecoveryPlan(CHECKPOINT, None, f"logical rank(s) {_list(unknown)} have not said which stage they are of")
    found, lacking = repairs.of_step(step, memory.ranks, memory.holdings, memory.dp_peers, memory.complete)
    lacking = sorted({*lacking, *(rank for rank in memory.ranks if step in memory.unusable.get(rank, ()))})
    members: dict[int, list[int]] = {}
    for rank in sorted(memory.ranks):
        members.setdefault(stages.places[rank].pp, []).append(rank)
    lenders = _lenders(step, lacking, memory, stages)
    lost = {stages.places[rank].pp for rank in lacking if rank not in lenders}
    lost |= {stage for stage, at in stages.rebuilt.items() if again and at == step}
    against = _against(step, sorted(lost), members, stages)
    if against:
        return RecoveryPlan(CHECKPOINT, None, against)
    at = {place: rank for rank, place in stages.places.items()}
    rebuilt = {rank: _neighbours(stages.places[rank], at) for stage in sorted(lost) for rank in members[stage]}
    lent = {rank: peer for rank, peer in lenders.items() if rank not in rebuilt}
    kept = {rank: source for rank, source in found.items() if rank not in rebuilt and rank not in lent}
    taken = ", ".join(f"logical rank {rank} takes the weights of its data-parallel peer {lent[rank]}" for rank in lent)
    beside = f"stage {_list(lost)} is rebuilt from the stages beside" if lost else ""
    reason = f"of step {step}, {'; '.join(filter(None, (beside, taken)))} (CheckFree)"
    return RecoveryPlan(CHECKFREE, step, reason, kept, rebuilt, lent)


def _lenders(step: int, lacking: Collection[int], memory: HostMemory, stages: Stages) -> dict[int, int]:
    """Return logical rank -> a data-parallel peer whose live model has the weights of ``step``, for ``lacking`` ranks.

    The peer restores its own snapshot, so its model is not written before the weights are sent.
    """
    by_part: dict[tuple[int, int, int], list[int]] = {}
    for rank in sorted(memory.ranks):
        held, place = memory.holdings.get(rank), stages.places[rank]
        is_whole = rank not in lacking and held is not None and held.live == step and step in held.own
        if is_whole and place.lends:
            by_part.setdefault((place.pp, place.tp, place.ep), []).append(rank)
    places = {rank: stages.places[rank] for rank in lacking}
    there = {rank: by_part.get((place.pp, place.tp, place.ep), []) for rank, place in places.items()}
    return {rank: peers[0] for rank, peers in there.items() if peers}


def _against(step: int, lost: list[int], members: Mapping[int, list[int]], stages: Stages) -> str:
    """Return why the lost stages cannot be rebuilt, or "" if they can."""
    last = max(members)
    for stage in lost:
        if stage + 1 in lost:
            return (
                f"of step {step}, the adjacent stages {stage} and {stage + 1} are both lost, and each needs the other"
            )
        if stage in (0, last) and (stages.checkfree != PLUS or last == 0):
            which = "first" if stage == 0 else "last"
            return f"of step {step}, stage {stage} is lost, the {which} one, which only CheckFree+ rebuilds"
        counts = {s: _blocks(members[s], stages) for s in (stage - 1, stage, stage + 1) if s in members}
        if len(set(counts.values())) > 1 or any(len(blocks) > 1 for blocks in counts.values()):
            by_stage = ", ".join(f"stage {s}: {_list(blocks)}" for s, blocks in sorted(counts.items()))
            return f"the stages do not hold as many transformer layers each ({by_stage})"
    return ""


def _blocks(ranks: Collection[int], stages: Stages) -> frozenset[int]:
    return frozenset(stages.places[rank].blocks for rank in ranks)


def _neighbours(place: GridPosition, at: Mapping[GridPosition, int]) -> Neighbours:
    return Neighbours(*(at.get(replace(place, pp=place.pp + way)) for way in (-1, 1)))


Snapshot = tuple[int, int, int]
"""(logical rank whose worker holds it, logical rank whose state it is, step)."""


@dataclass(frozen=True)
class Seats:
    """The seats of this replica.

    Attributes:
        vacant: logical ranks whose worker is lost.
        standbys: number of standbys that are ready and have a device.
        room: number of further workers that nodes have room for.
    """

    vacant: Collection[int] = ()
    standbys: int = 0
    room: int = 0

    @property
    def rung(self) -> str | None:
        """Return the first rung that fills all seats, or None if they cannot be filled."""
        if not self.vacant:
            return IN_PLACE
        if len(self.vacant) <= self.standbys:
            return STANDBY
        return COPY if len(self.vacant) <= self.standbys + self.room else None


@dataclass(frozen=True)
class Others:
    """The other replicas.

    Attributes:
        replicas: number of replicas of the job, with this one.
        least: number of replicas that a step needs.
        whole: numbers of the other replicas that can train on now, at the newest committed step.
        holdings: number of another replica, the nearest first -> logical rank -> steps of whose state that replica has
            a verified source.
        reorders: whether the others compute a lost replica's part of the batch (SPARe).
        unhosted: with ``reorders``, the shard types that no replica hosts any more. Whoever is free computes them.
        are_unknown: whether nothing but ``replicas`` is known here. The quorum server knows the others; it has a
            replica without a state fetch that of another one, or the newest checkpoint if none has a state.
    """

    replicas: int = 1
    least: int = 1
    whole: Collection[int] = ()
    holdings: Mapping[int, Mapping[int, Collection[int]]] = field(default_factory=dict)
    reorders: bool = False
    unhosted: Collection[int] = ()
    are_unknown: bool = False

    @property
    def lost_without_this(self) -> Lost:
        """Return what is lost if the others train on without this replica: if nobody computes its part of the batches,
        these samples are trained on later.
        """
        return Lost(exactness=EVERY_SAMPLE, late=0.0 if self.reorders else 1.0 / self.replicas)


@dataclass(frozen=True)
class Restarts:
    """Warm restarts, in which all workers start anew.

    Attributes:
        allowed: number of them that the user allows.
        used: number of them so far.
        workers: number of workers of this replica.
        has_room: whether the nodes that are left have room for them.
        checkpoints: steps of the verified checkpoints; None: only the worker that loads one knows.
    """

    allowed: int = 3
    used: int = 0
    workers: int = 1
    has_room: bool = True
    checkpoints: Collection[int] | None = None

    @property
    def against(self) -> str:
        """Return why there can be no warm restart, or ""."""
        if self.used >= self.allowed:
            return f"{self.allowed} warm restart(s) are allowed and used up"
        return "" if self.has_room else f"the nodes that are left cannot hold {self.workers} workers"

    def steps_since(self, step: int) -> int | None:
        """Return how many steps a run has to repeat to be at ``step`` again, or None if that is not known."""
        if self.checkpoints is None:
            return None
        return step - max((saved for saved in self.checkpoints if saved <= step), default=0)


@dataclass(frozen=True)
class Situation:
    """The situation of one damaged replica.

    Attributes:
        step: the newest committed step.
        memory: the snapshots in the memory of this replica's live workers.
        stages: its pipeline stages, and whether CheckFree may rebuild them.
        seats: its seats.
        others: the other replicas.
        restarts: warm restarts.
        hot_swap: whether workers are replaced, and states restored from memory, while the others live on.
        barred: why nothing in this replica's memory may be used, such as an error of the program; "": it may be used.
        unverified: snapshots that were found wrong, or are not checked.
    """

    step: int
    memory: HostMemory
    stages: Stages = field(default_factory=Stages)
    seats: Seats = field(default_factory=Seats)
    others: Others = field(default_factory=Others)
    restarts: Restarts = field(default_factory=Restarts)
    hot_swap: bool = True
    barred: str = ""
    unverified: Collection[Snapshot] = ()

    def verified(self) -> HostMemory:
        """Return the memory without the snapshots that are not verified."""
        if not self.unverified:
            return self.memory
        kept = {}
        for holder, held in self.memory.holdings.items():
            own = [step for step in held.own if (holder, holder, step) not in self.unverified]
            copies = {
                owner: [step for step in steps if (holder, owner, step) not in self.unverified]
                for owner, steps in held.copies.items()
            }
            kept[holder] = Holdings(own, copies, held.live if held.live in own else None)
        return replace(self.memory, holdings=kept)


def of_memory(state: ControlState) -> Situation:
    """Return the situation of a recovery in which every seat has a worker, and every survivor has reported what it
    holds.
    """
    recovery = state.recovery
    assert recovery is not None
    memory = HostMemory(
        list(state.seats),
        {w.rank: held for w in state.seated() if w.rank is not None and (held := _held(w)) is not None},
        state.dp_peers,
        {rank for rank, all_of_it in state.complete.items() if all_of_it},
        recovery.spoiled,
        recovery.unusable,
        recovery.unbuildable,
    )
    joiners = [w.rank for w in state.seated() if w.rank is not None and w.empty]
    started = len(set(joiners).intersection(recovery.awaited))
    return Situation(
        state.newest_step(),
        memory,
        Stages(state.checkfree, state.places, state.rebuilt),
        Seats(joiners, len(joiners) - started, started),
        _others(state),
        restarts=_restarts(state),
        hot_swap=state.options.hot_swap,
    )


def _held(worker: Worker) -> Holdings | None:
    """Return the snapshots that a worker has reported; those that a joiner has inherited count."""
    if worker.release is not None:
        return worker.release.holdings
    return worker.arrived.holdings if worker.arrived is not None and worker.arrived.holdings != Holdings() else None


def without_memory(state: ControlState, why: str) -> Situation:
    """Return the situation in which nothing in memory may be used; ``why``: the reason, for people."""
    memory = HostMemory(range(state.options.world_size), {}, {})
    return Situation(state.newest_step(), memory, others=_others(state), restarts=_restarts(state), barred=why)


def _others(state: ControlState) -> Others:
    options = state.options
    return Others(options.replicas, reorders=options.reorders, are_unknown=options.replicas > 1)


def _restarts(state: ControlState) -> Restarts:
    options = state.options
    has_room = place_ranks(state.agents.values(), options.world_size) is not None
    return Restarts(options.max_restarts, state.restarts, options.world_size, has_room)


_IN_MEMORY = (IN_PLACE, STANDBY, COPY, REPLICA, CHECKFREE)


@dataclass(frozen=True)
class Offer:
    """A recovery that is possible.

    Attributes:
        rung: one of ``LADDER``.
        reason: why it is possible, for people.
        lost: what it loses.
        waits: the limits of all waits that it can lead to, one after the other, as ``table.field``; see
            :func:`ft.job.control.recovery.waits`.
        plan: the step and the source of each rank, if the state comes from memory.
        fetched: logical rank -> number of the replica that it fetches its state from.
    """

    rung: str
    reason: str
    lost: Lost
    waits: tuple[str, ...] = ()
    plan: RecoveryPlan | None = None
    fetched: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Decision(Offer):
    """The recovery that is taken. ``refused``: every other rung before it -> why that one is not taken."""

    refused: Mapping[str, str] = field(default_factory=dict)


def decide(situation: Situation) -> Decision:
    """Return the first rung that is possible and that no other possible rung betters in what it loses."""
    refused: dict[str, str] = {}
    offers = [
        *_from_memory(situation, refused),
        *_without_this_replica(situation, refused),
        *_anew(situation, refused),
    ]
    for offer in offers:
        better = next((other for other in offers if other.lost.is_less_than(offer.lost)), None)
        if better is not None:
            refused[offer.rung] = f"{better.rung} loses less: {better.reason}"
    best = [offer for offer in offers if not any(other.lost.is_less_than(offer.lost) for other in offers)]
    chosen = min(best, key=lambda offer: LADDER.index(offer.rung)) if best else _end(situation, refused)
    before = LADDER[: LADDER.index(chosen.rung)]
    return Decision(**vars(chosen), refused={rung: refused[rung] for rung in before if rung in refused})


def _from_memory(situation: Situation, refused: dict[str, str]) -> Iterator[Offer]:
    """Yield the offers that keep this replica's workers and fill its empty seats."""
    rung, vacant = situation.seats.rung, situation.seats.vacant
    against = situation.barred or _no_memory(situation)
    if against or rung is None:
        refused |= dict.fromkeys(_IN_MEMORY, against)
        return
    memory = situation.verified()
    plan = plan_from_memory(memory, situation.stages)
    if plan.name == COPY:
        yield _from_copies(situation, rung, plan, refused)
    else:
        *_, why = repairs.choose(memory.ranks, memory.holdings, memory.dp_peers, memory.spoiled, memory.complete)
        refused |= dict.fromkeys((IN_PLACE, STANDBY, COPY), why or plan.reason)
    if vacant:
        refused[IN_PLACE] = f"logical rank(s) {_list(vacant)} have lost their worker"
    if situation.others.holdings:
        pooled = plan_from_memory(_pooled(memory, situation), situation.stages)
        plan, fetched = _fetching(pooled, memory, situation)
        if plan.name == COPY and fetched:
            where = ", ".join(f"{rank} from replica {replica}" for rank, replica in sorted(fetched.items()))
            reason = f"of step {plan.step}, the other replicas have what this one lacks: logical rank(s) {where}"
            lost = Lost(steps=_since(situation, plan))
            yield Offer(REPLICA, reason, lost, waits(rung), plan, fetched)
    else:
        fetched = {}
    if situation.others.are_unknown and plan.name == CHECKPOINT:
        found = plan_fetch(memory, plan.reason)
        if found is not None:
            yield Offer(REPLICA, found.reason, situation.others.lost_without_this, waits(rung), found)
    if plan.name == CHECKFREE:
        lost = Lost(steps=_since(situation, plan), exactness=APPROXIMATE)
        yield Offer(CHECKFREE, plan.reason, lost, waits(rung), plan, fetched)
    else:
        refused[CHECKFREE] = plan.reason


def _no_memory(situation: Situation) -> str:
    if not situation.hot_swap:
        return "hot-swap is off"
    if situation.seats.rung is None:
        seats, standbys = len(situation.seats.vacant), situation.seats.standbys
        return f"{seats} seat(s) are empty, {standbys} standby(s) are ready, and no node has room for another worker"
    return ""


def _from_copies(situation: Situation, seats: str, plan: RecoveryPlan, refused: dict[str, str]) -> Offer:
    """Return the offer of IN_PLACE, STANDBY or COPY, and note why those before it are not possible."""
    vacant = frozenset(situation.seats.vacant)
    taken_over = sorted(rank for rank, source in plan.sources.items() if rank not in vacant and source.owned != rank)
    rung = COPY if taken_over else seats
    if seats == COPY:
        refused[STANDBY] = f"{situation.seats.standbys} standby(s) are ready for {len(vacant)} seat(s)"
    if taken_over:
        why = f"logical rank(s) {_list(taken_over)} have no usable snapshot of step {plan.step} of their own"
        refused |= {IN_PLACE: why, STANDBY: why}
    return Offer(rung, plan.reason, Lost(steps=_since(situation, plan)), waits(seats), plan)


def _pooled(memory: HostMemory, situation: Situation) -> HostMemory:
    """Return the memory as if each rank had every state of it that this replica or another one has a source of."""
    there = situation.others.holdings.values()
    own = {rank: {step for held in there for step in held.get(rank, ())} for rank in memory.ranks}
    for step in repairs.steps_held(memory.holdings):
        inside, _ = repairs.of_step(step, memory.ranks, memory.holdings, memory.dp_peers, memory.complete)
        for rank in inside:
            own[rank].add(step)
    live = {rank: held.live for rank, held in memory.holdings.items() if held.live in held.own}
    return replace(memory, holdings={rank: Holdings(sorted(own[rank]), live=live.get(rank)) for rank in own})


def _fetching(plan: RecoveryPlan, memory: HostMemory, situation: Situation) -> tuple[RecoveryPlan, dict[int, int]]:
    """Return the plan with sources inside this replica wherever it has them, and rank -> replica for all others."""
    if plan.step is None:
        return plan, {}
    inside, _ = repairs.of_step(plan.step, memory.ranks, memory.holdings, memory.dp_peers, memory.complete)
    fetched = {}
    for rank in plan.sources.keys() - inside.keys():
        having = (r for r, held in situation.others.holdings.items() if plan.step in held.get(rank, ()))
        if (nearest := next(having, None)) is not None:
            fetched[rank] = nearest
    kept = {rank: inside.get(rank, source) for rank, source in plan.sources.items() if rank not in fetched}
    return replace(plan, sources=kept), fetched


def _without_this_replica(situation: Situation, refused: dict[str, str]) -> Iterator[Offer]:
    """Yield the offer that the other replicas train on, or wait for this one, while it starts anew."""
    others = situation.others
    if others.are_unknown:
        yield from _while_others_train(situation, refused)
        return
    if others.replicas <= 1:
        refused |= {REPLICA: "the job has one replica", REORDER: "the job has one replica"}
        return
    if not others.reorders:
        refused[REORDER] = "SPARe is off"
    against = situation.restarts.against
    short = too_few(len(others.whole), others.replicas, others.least)
    if short and (not others.whole or against):
        back = f", and this one cannot come back: {against}" if others.whole else ""
        refused |= {REORDER: refused.get(REORDER, short), REPLICA: refused.get(REPLICA) or f"{short}{back}"}
        return
    if short:
        reason = f"{short}: they wait for this one, which fetches its state from them"
        yield Offer(REPLICA, reason, Lost(exactness=EVERY_SAMPLE), waits_of_others(is_awaited=True))
    elif others.reorders:
        types = f"; no replica hosts the shard types {_list(others.unhosted)} any more, whoever is free computes them"
        reason = f"replica(s) {_list(others.whole)} compute this one's part{types if others.unhosted else ''}"
        yield Offer(REORDER, reason, others.lost_without_this, waits_of_others(is_awaited=False))
    else:
        back = f"cannot come back: {against}" if against else "fetches its state from them when it is back"
        reason = f"replica(s) {_list(others.whole)} train on, and this one {back}"
        yield Offer(REPLICA, reason, others.lost_without_this, waits_of_others(is_awaited=False))


def _while_others_train(situation: Situation, refused: dict[str, str]) -> Iterator[Offer]:
    """Yield the offer of a warm restart of this replica alone, if it does not know how the others are.

    When it is back, it fetches the state of the others, or all load the newest checkpoint if none has a state.
    """
    others = situation.others
    if not others.reorders:
        refused[REORDER] = "SPARe is off"
    against = situation.restarts.against
    if CHECKFREE not in refused:
        against = "an estimate in place gives way to the others' exact state, if they have it"
    if against:
        refused |= {rung: refused.get(rung, against) for rung in (REPLICA, REORDER)}
        return
    rung = REORDER if others.reorders else REPLICA
    yield Offer(rung, _cause(situation, refused), others.lost_without_this, waits_of_others(is_awaited=False))


def _anew(situation: Situation, refused: dict[str, str]) -> Iterator[Offer]:
    """Yield the offer of a warm restart of all workers of the job."""
    if situation.others.are_unknown and not situation.restarts.against:
        refused[CHECKPOINT] = "the other replicas may have the state"
        return
    if against := situation.restarts.against:
        refused[CHECKPOINT] = against
        return
    lost = Lost(steps=situation.restarts.steps_since(situation.step), starts_anew=True)
    yield Offer(CHECKPOINT, _cause(situation, refused), lost, WARM_RESTART)


def _end(situation: Situation, refused: dict[str, str]) -> Offer:
    lost = Lost(steps=situation.restarts.steps_since(situation.step), starts_anew=True, ended=True)
    reason = f"{_cause(situation, refused)}\n  The run ends: {refused[CHECKPOINT]}"
    return Offer(END, reason, lost)


def _cause(situation: Situation, refused: Mapping[str, str]) -> str:
    """Return why no state in memory is used."""
    return refused.get(CHECKFREE, "") or situation.barred


def _since(situation: Situation, plan: RecoveryPlan) -> int:
    return max(0, situation.step - (plan.step or 0))


def _list(numbers: Collection[int]) -> str:
    return ", ".join(map(str, sorted(numbers)))
