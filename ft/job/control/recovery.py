"""Decides which kind of recovery follows a fault, why, what it loses, and where the state comes from.

The control plane decides with :func:`decide`, and ``ft plan policy`` shows the same decisions. The function is
pure and total: it does no I/O, reads no clock, and answers every situation. The kinds of recovery are the levels of
``LADDER``. Every level that is possible in a situation makes an offer, which says what it loses; the first one is
taken, because no level loses more than a later one in any respect without losing less in another. A replica decides for
itself: it does not know what the other replicas hold.

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
"""The levels, from the one that is tried first.

- in place: every worker keeps its seat and its own snapshot; all repeat the interrupted step.
- standby: ready standbys take the seats of lost workers, with peer copies.
- copy elsewhere: a worker has to be started for a seat first, or one that kept its seat takes over a peer copy, because
  its own snapshot is unusable.
- another replica: the workers stay, and fetch the whole state from another replica; or, if the seats cannot be filled,
  the other replicas train on, and this one starts anew and fetches its state from them.
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

_RELEASE, _JOIN, _START = ("control.drain_s",), ("control.assemble_s",), ("control.ready_s",)
_REPAIR = ("control.repair_s", "control.repair_s")  # restore the state, and begin the first step
_OTHERS = ("quorum.silent_s", "quorum.member_s")  # until the other replicas train on
WARM_RESTART = ("control.join_s",)
TABLES = ("control", "quorum")
"""The tables of limits: ``ft.job.control.timeouts.Timeouts`` and ``ft.job.quorum.limits.Limits``."""


@dataclass(frozen=True)
class Lost:
    """What a recovery loses.

    Attributes:
        steps: committed steps that are repeated; None: not known, because the age of the checkpoint is not.
        exactness: EXACT, EVERY_SAMPLE or APPROXIMATE.
        samples: samples that are never trained on. The position in the data is part of every state that a level
            restores, so no level gives up samples.
        late: share of each batch that is trained on later, when the replica is back.
        starts_anew: whether all workers of the job start anew.
        ended: whether the run ends or, of several replicas, this one for good.
    """

    steps: int | None = 0
    exactness: str = EXACT
    samples: int = 0
    late: float = 0.0
    starts_anew: bool = False
    ended: bool = False


def waits(seats: str) -> tuple[str, ...]:
    """Return the limits of a recovery in memory, one after the other, as ``table.field`` (``TABLES``).

    ``seats``: IN_PLACE if every worker keeps its seat, STANDBY if standbys are ready for all others, COPY if workers
    have to be started.
    """
    before = {IN_PLACE: (), STANDBY: _JOIN, COPY: (*_START, *_JOIN)}[seats]
    return (*_RELEASE, *before, *_REPAIR)


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
        name: COPY (own snapshots and peer copies; the seats to fill decide of which level such a recovery is), REPLICA
            (another replica), CHECKFREE or CHECKPOINT.
        step: step to restore, or None for a restart.
        reason: why, for people; for a restart, why neither copies nor CheckFree are possible.
        sources: logical rank -> its source, for all ranks that are neither in ``rebuilt`` nor in ``lent``.
        rebuilt: logical rank -> the neighbours from whose transformer blocks it is rebuilt.
        lent: logical rank -> the data-parallel peer whose weights it takes.
        position_of: logical rank from which all ranks get the position of ``step`` if they fetch the state (REPLICA).
    """

    name: str
    step: int | None
    reason: str
    sources: Mapping[int, Source] = field(default_factory=dict)
    rebuilt: Mapping[int, Neighbours] = field(default_factory=dict)
    lent: Mapping[int, int] = field(default_factory=dict)
    position_of: int | None = None


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
    step, position_of = max(told)
    return RecoveryPlan(REPLICA, step, f"{why}; this replica takes the state of another one", position_of=-position_of)


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
    def level(self) -> str | None:
        """Return the first level that fills all seats, or None if they cannot be filled."""
        if not self.vacant:
            return IN_PLACE
        if len(self.vacant) <= self.standbys:
            return STANDBY
        return COPY if len(self.vacant) <= self.standbys + self.room else None


@dataclass(frozen=True)
class Others:
    """The other replicas, of which only the number is known here.

    The quorum server knows them: it has a replica without a state fetch that of another one, or the newest checkpoint
    if none has a state.

    Attributes:
        replicas: number of replicas of the job, with this one.
        reorders: whether the others compute a lost replica's part of the batch (SPARe).
    """

    replicas: int = 1
    reorders: bool = False

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
            own = self._verified(holder, {holder: held.own})[holder]
            copies, whole = self._verified(holder, held.copies), self._verified(holder, held.whole)
            kept[holder] = Holdings(own, copies, held.live if held.live in own else None, whole)
        return replace(self.memory, holdings=kept)

    def _verified(self, holder: int, held: Mapping[int, list[int]]) -> dict[int, list[int]]:
        return {
            owner: [step for step in steps if (holder, owner, step) not in self.unverified]
            for owner, steps in held.items()
        }


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
        Others(state.options.replicas, state.options.reorders),
        _restarts(state),
        state.options.hot_swap,
    )


def _held(worker: Worker) -> Holdings | None:
    """Return the snapshots that a worker has reported, with those that it has taken over from ended workers."""
    reports = [report for report in (worker.release, worker.arrived) if report is not None]
    # It may have inherited snapshots between the two. Of one epoch, it sends the release later; max returns the first.
    last = max(reports, key=lambda report: report.epoch, default=None)
    held = Holdings() if last is None else last.holdings
    if worker.inherited is not None:
        held = replace(
            held,
            copies=_joined(held.copies, worker.inherited.copies),
            whole=_joined(held.whole, worker.inherited.whole),
        )
    return held if worker.release is not None or held != Holdings() else None


def _joined(one: Mapping[int, list[int]], other: Mapping[int, list[int]]) -> dict[int, list[int]]:
    return {owner: sorted({*one.get(owner, ()), *other.get(owner, ())}) for owner in {**one, **other}}


def without_memory(state: ControlState, why: str) -> Situation:
    """Return the situation in which nothing in memory may be used; ``why``: the reason, for people."""
    memory = HostMemory(range(state.options.world_size), {}, {})
    others = Others(state.options.replicas, state.options.reorders)
    return Situation(state.newest_step(), memory, others=others, restarts=_restarts(state), barred=why)


def _restarts(state: ControlState) -> Restarts:
    options = state.options
    has_room = place_ranks(state.agents.values(), options.world_size) is not None
    return Restarts(options.max_restarts, state.restarts, options.world_size, has_room)


_IN_MEMORY = (IN_PLACE, STANDBY, COPY, REPLICA, CHECKFREE)


@dataclass(frozen=True)
class Offer:
    """A recovery that is possible.

    Attributes:
        level: one of ``LADDER``.
        reason: why it is possible, for people.
        lost: what it loses.
        waits: the limits of all waits that it can lead to, one after the other, as ``table.field``; see
            :func:`ft.job.control.recovery.waits`.
        plan: the step and the source of each rank, if the state comes from memory.
    """

    level: str
    reason: str
    lost: Lost
    waits: tuple[str, ...] = ()
    plan: RecoveryPlan | None = None


@dataclass(frozen=True)
class Decision(Offer):
    """The recovery that is taken. ``refused``: every other level before it -> why that one is not taken."""

    refused: Mapping[str, str] = field(default_factory=dict)


def decide(situation: Situation) -> Decision:
    """Return the first level that is possible."""
    refused: dict[str, str] = {}
    offers = [
        *_from_memory(situation, refused),
        *_without_this_replica(situation, refused),
        *_anew(situation, refused),
    ]
    chosen = min(offers, key=lambda offer: LADDER.index(offer.level)) if offers else _end(situation, refused)
    before = LADDER[: LADDER.index(chosen.level)]
    return Decision(**vars(chosen), refused={level: refused[level] for level in before if level in refused})


def _from_memory(situation: Situation, refused: dict[str, str]) -> Iterator[Offer]:
    """Yield the offers that keep this replica's workers and fill its empty seats."""
    level, vacant = situation.seats.level, situation.seats.vacant
    against = situation.barred or _no_memory(situation)
    if against or level is None:
        refused |= dict.fromkeys(_IN_MEMORY, against)
        return
    memory = situation.verified()
    plan = plan_from_memory(memory, situation.stages)
    if plan.name == COPY:
        yield _from_copies(situation, level, plan, refused)
    else:
        *_, why = repairs.choose(memory.ranks, memory.holdings, memory.dp_peers, memory.spoiled, memory.complete)
        refused |= dict.fromkeys((IN_PLACE, STANDBY, COPY), why or plan.reason)
    if vacant:
        refused[IN_PLACE] = f"logical rank(s) {_list(vacant)} have lost their worker"
    if situation.others.replicas > 1 and plan.name == CHECKPOINT:
        found = plan_fetch(memory, plan.reason)
        if found is not None:
            yield Offer(REPLICA, found.reason, situation.others.lost_without_this, waits(level), found)
    if plan.name == CHECKFREE:
        lost = Lost(steps=_since(situation, plan), exactness=APPROXIMATE)
        yield Offer(CHECKFREE, plan.reason, lost, waits(level), plan)
    else:
        refused[CHECKFREE] = plan.reason


def _no_memory(situation: Situation) -> str:
    if not situation.hot_swap:
        return "hot-swap is off"
    if situation.seats.level is None:
        seats, standbys = len(situation.seats.vacant), situation.seats.standbys
        return f"{seats} seat(s) are empty, {standbys} standby(s) are ready, and no node has room for another worker"
    return ""


def _from_copies(situation: Situation, seats: str, plan: RecoveryPlan, refused: dict[str, str]) -> Offer:
    """Return the offer of IN_PLACE, STANDBY or COPY, and note why those before it are not possible."""
    vacant = frozenset(situation.seats.vacant)
    taken_over = sorted(rank for rank, source in plan.sources.items() if rank not in vacant and source.owned != rank)
    level = COPY if taken_over else seats
    if seats == COPY:
        refused[STANDBY] = f"{situation.seats.standbys} standby(s) are ready for {len(vacant)} seat(s)"
    if taken_over:
        why = f"logical rank(s) {_list(taken_over)} have no usable snapshot of step {plan.step} of their own"
        refused |= {IN_PLACE: why, STANDBY: why}
    return Offer(level, plan.reason, Lost(steps=_since(situation, plan)), waits(seats), plan)


def _without_this_replica(situation: Situation, refused: dict[str, str]) -> Iterator[Offer]:
    """Yield the offer that the others train on while this replica starts anew, or without it if it cannot.

    When it is back, it fetches the state of the others, or all load the newest checkpoint if none has a state.
    """
    others = situation.others
    if others.replicas <= 1:
        refused |= {REPLICA: "the job has one replica", REORDER: "the job has one replica"}
        return
    if not others.reorders:
        refused[REORDER] = "SPARe is off"
    if CHECKFREE not in refused:
        against = "an estimate in place gives way to the others' exact state, if they have it"
        refused |= {level: refused.get(level, against) for level in (REPLICA, REORDER)}
        return
    level, against = REORDER if others.reorders else REPLICA, situation.restarts.against
    reason = _cause(situation, refused) + (f"\n  This replica ends: {against}" if against else "")
    yield Offer(level, reason, replace(others.lost_without_this, ended=bool(against)), _OTHERS)


def _anew(situation: Situation, refused: dict[str, str]) -> Iterator[Offer]:
    """Yield the offer of a warm restart of all workers of the job."""
    others_may = "the other replicas may have the state" if situation.others.replicas > 1 else ""
    if against := others_may or situation.restarts.against:
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
