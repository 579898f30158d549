"""The recovery ladder: which kind of recovery follows a fault, why, and what it loses.

The control plane decides with :func:`decide`, and ``ft plan policy`` shows the same decisions. The function is
pure and total: it does no I/O, reads no clock, and answers every situation. The kinds of recovery are the rungs of
:mod:`ft.job.control.rungs`. Every rung that is possible in a situation makes an offer, which says what it loses. The
first rung of the ladder is taken whose offer is not worse in any respect than another one: a snapshot of an earlier
step in this replica, for example, gives way to the newest step in another replica.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace

from ft.job.control import recovery_plan, sources
from ft.job.control.membership import place_ranks
from ft.job.control.recovery_plan import Memory, RecoveryPlan, Stages
from ft.job.control.rungs import (
    APPROXIMATE,
    CHECKFREE,
    CHECKPOINT,
    COPY,
    END,
    EVERY_SAMPLE,
    IN_PLACE,
    LADDER,
    REORDER,
    REPLICA,
    STANDBY,
    Lost,
    too_few,
    waits,
    waits_of_others,
    waits_of_restart,
)
from ft.job.control.state import State
from ft.job.messages import Holdings

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
    memory: Memory
    stages: Stages = field(default_factory=Stages)
    seats: Seats = field(default_factory=Seats)
    others: Others = field(default_factory=Others)
    restarts: Restarts = field(default_factory=Restarts)
    hot_swap: bool = True
    barred: str = ""
    unverified: Collection[Snapshot] = ()

    def verified(self) -> Memory:
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


def of_memory(state: State) -> Situation:
    """Return the situation of a recovery in which every seat has a worker, and every survivor has reported what it
    holds.
    """
    recovery = state.recovery
    assert recovery is not None
    memory = Memory(
        list(state.seats),
        {w.rank: w.release.holdings for w in state.seated() if w.rank is not None and w.release is not None},
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


def without_memory(state: State, why: str) -> Situation:
    """Return the situation in which nothing in memory may be used; ``why``: the reason, for people."""
    memory = Memory(range(state.options.world_size), {}, {})
    return Situation(state.newest_step(), memory, others=_others(state), restarts=_restarts(state), barred=why)


def _others(state: State) -> Others:
    options = state.options
    return Others(options.replicas, reorders=options.reorders, are_unknown=options.replicas > 1)


def _restarts(state: State) -> Restarts:
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
            :func:`ft.job.control.rungs.waits`.
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
    plan = recovery_plan.decide(memory, situation.stages)
    if plan.name == recovery_plan.COPIES:
        yield _from_copies(situation, rung, plan, refused)
    else:
        *_, why = sources.choose(memory.ranks, memory.holdings, memory.dp_peers, memory.spoiled, memory.complete)
        refused |= dict.fromkeys((IN_PLACE, STANDBY, COPY), why or plan.reason)
    if vacant:
        refused[IN_PLACE] = f"logical rank(s) {_list(vacant)} have lost their worker"
    if situation.others.holdings:
        pooled = recovery_plan.decide(_pooled(memory, situation), situation.stages)
        plan, fetched = _fetching(pooled, memory, situation)
        if plan.name == recovery_plan.COPIES and fetched:
            where = ", ".join(f"{rank} from replica {replica}" for rank, replica in sorted(fetched.items()))
            reason = f"of step {plan.step}, the other replicas have what this one lacks: logical rank(s) {where}"
            lost = Lost(steps=_since(situation, plan))
            yield Offer(REPLICA, reason, lost, waits(rung), plan, fetched)
    else:
        fetched = {}
    if situation.others.are_unknown and plan.name == recovery_plan.RESTART:
        found = recovery_plan.fetch(memory, plan.reason)
        if found is not None:
            yield Offer(REPLICA, found.reason, situation.others.lost_without_this, waits(rung), found)
    if plan.name == recovery_plan.REBUILD:
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


def _pooled(memory: Memory, situation: Situation) -> Memory:
    """Return the memory as if each rank had every state of it that this replica or another one has a source of."""
    there = situation.others.holdings.values()
    own = {rank: {step for held in there for step in held.get(rank, ())} for rank in memory.ranks}
    for step in sources.steps_held(memory.holdings):
        inside, _ = sources.of_step(step, memory.ranks, memory.holdings, memory.dp_peers, memory.complete)
        for rank in inside:
            own[rank].add(step)
    live = {rank: held.live for rank, held in memory.holdings.items() if held.live in held.own}
    return replace(memory, holdings={rank: Holdings(sorted(own[rank]), live=live.get(rank)) for rank in own})


def _fetching(plan: RecoveryPlan, memory: Memory, situation: Situation) -> tuple[RecoveryPlan, dict[int, int]]:
    """Return the plan with sources inside this replica wherever it has them, and rank -> replica for all others."""
    if plan.step is None:
        return plan, {}
    inside, _ = sources.of_step(plan.step, memory.ranks, memory.holdings, memory.dp_peers, memory.complete)
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
    yield Offer(CHECKPOINT, _cause(situation, refused), lost, waits_of_restart())


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
