"""Choice of the source of state inside one replica: in-memory copies first, then CheckFree, then the checkpoint.

This is the part of the recovery ladder (:mod:`ft.job.control.ladder`) that looks into the memory of one replica's
workers. :func:`decide` is a pure function. CheckFree (section 4.2) rebuilds a pipeline stage whose state is lost from
the two neighbouring stages. This makes the loss jump once, while a warm restart from the persistent checkpoint repeats
every step since that checkpoint. Of a stage that is lost in part, the lost ranks take the weights of their
data-parallel peers, which are exact, and begin with new optimizer moments.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from ft.job.control import rungs, sources
from ft.job.control.state import GridPosition
from ft.job.messages import Holdings, Neighbours, Source

COPIES, FETCH, REBUILD, RESTART = rungs.COPY, rungs.REPLICA, rungs.CHECKFREE, rungs.CHECKPOINT
"""The rungs of the ladder whose state comes from own snapshots and peer copies, from another replica, from the stages
beside, and from the persistent checkpoint. Of which rung before COPIES a recovery from copies is, is
decided by the seats that have to be filled.
"""

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
class Memory:
    """The training state in the host memory of the live workers.

    A snapshot is one rank's state at a committed step; a peer copy is the copy of it that a data-parallel peer holds.

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
        name: COPIES, REBUILD or RESTART.
        step: step to restore, or None for a restart.
        reason: why, for people; for a restart, why neither copies nor CheckFree are possible.
        sources: logical rank -> its source, for all ranks that are neither in ``rebuilt`` nor in ``lent``.
        rebuilt: logical rank -> the neighbours from whose transformer blocks it is rebuilt.
        lent: logical rank -> the data-parallel peer whose weights it takes.
        teller: logical rank from which all ranks get the position of ``step`` if they fetch the state (FETCH).
    """

    name: str
    step: int | None
    reason: str
    sources: Mapping[int, Source] = field(default_factory=dict)
    rebuilt: Mapping[int, Neighbours] = field(default_factory=dict)
    lent: Mapping[int, int] = field(default_factory=dict)
    teller: int | None = None


def decide(memory: Memory, stages: Stages) -> RecoveryPlan:
    """Return the first source of state that is possible.

    Copies of an earlier step are preferred to a rebuild at a later step, because they cost only the repeated steps.
    With CheckFree+, a rebuild that was interrupted at this same step is repeated: it also changes the neighbour that
    holds the second copy of the embedding or the output head, so snapshots of the two stages may come from before and
    after the rebuild.
    """
    step, found, why = sources.choose(memory.ranks, memory.holdings, memory.dp_peers, memory.spoiled, memory.complete)
    if step is not None:
        if stages.checkfree == PLUS and step in stages.rebuilt.values():
            plan = _rebuild(step, memory, stages, again=True)
            if plan.name == REBUILD:
                return plan
        return RecoveryPlan(COPIES, step, f"step {step} is the newest that every logical rank has a source of", found)
    lost = f"{LOST}: {why}"
    if not stages.checkfree:
        return RecoveryPlan(RESTART, None, lost)
    against = ""
    for step in sources.steps_held(memory.holdings):
        for again in (True, False) if stages.checkfree == PLUS else (False,):
            plan = _rebuild(step, memory, stages, again=again)
            if plan.name == REBUILD:
                return plan
        against = against or plan.reason
    against = against or "there is no stage to rebuild from"
    return RecoveryPlan(RESTART, None, f"{lost}; {AGAINST}: {against}; {LAST_RESORT}")


def fetch(memory: Memory, why: str) -> RecoveryPlan | None:
    """Return the plan that all ranks fetch their state from another replica, which none of them is asked for here.

    Until then, all ranks need the same position. It is that of the newest sound snapshot that a worker has of its own.

    Args:
        memory: the training state in this replica's memory.
        why: why this replica has no complete state, for people.

    Returns:
        None if no worker has one; then nothing is left of this replica that would be worth keeping.
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
    return RecoveryPlan(FETCH, step, f"{why}; this replica takes the state of another one", teller=-teller)


def _rebuild(step: int, memory: Memory, stages: Stages, *, again: bool) -> RecoveryPlan:
    """Return a REBUILD at ``step``, or a RESTART with the reason why that is impossible.

    ``again``: whether stages that were already rebuilt at this step are rebuilt again.
    """
    if step in memory.unbuildable:
        return RecoveryPlan(RESTART, None, f"at step {step} the neighbours' blocks turned out unusable")
    if unknown := sorted(rank for rank in memory.ranks if rank not in stages.places):
        return RecoveryPlan(RESTART, None, f"logical rank(s) {_list(unknown)} have not said which stage they are of")
    found, lacking = sources.of_step(step, memory.ranks, memory.holdings, memory.dp_peers, memory.complete)
    lacking = sorted({*lacking, *(rank for rank in memory.ranks if step in memory.unusable.get(rank, ()))})
    members: dict[int, list[int]] = {}
    for rank in sorted(memory.ranks):
        members.setdefault(stages.places[rank].pp, []).append(rank)
    lenders = _lenders(step, lacking, memory, stages)
    lost = {stages.places[rank].pp for rank in lacking if rank not in lenders}
    lost |= {stage for stage, at in stages.rebuilt.items() if again and at == step}
    against = _against(step, sorted(lost), members, stages)
    if against:
        return RecoveryPlan(RESTART, None, against)
    at = {place: rank for rank, place in stages.places.items()}
    rebuilt = {rank: _neighbours(stages.places[rank], at) for stage in sorted(lost) for rank in members[stage]}
    lent = {rank: peer for rank, peer in lenders.items() if rank not in rebuilt}
    kept = {rank: source for rank, source in found.items() if rank not in rebuilt and rank not in lent}
    taken = ", ".join(f"logical rank {rank} takes the weights of its data-parallel peer {lent[rank]}" for rank in lent)
    beside = f"stage {_list(sorted(lost))} is rebuilt from the stages beside" if lost else ""
    reason = f"of step {step}, {'; '.join(filter(None, (beside, taken)))} (CheckFree)"
    return RecoveryPlan(REBUILD, step, reason, kept, rebuilt, lent)


def _lenders(step: int, lacking: Collection[int], memory: Memory, stages: Stages) -> dict[int, int]:
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
            by_stage = ", ".join(f"stage {s}: {_list(sorted(blocks))}" for s, blocks in sorted(counts.items()))
            return f"the stages do not hold as many transformer layers each ({by_stage})"
    return ""


def _blocks(ranks: Collection[int], stages: Stages) -> frozenset[int]:
    return frozenset(stages.places[rank].blocks for rank in ranks)


def _neighbours(place: GridPosition, at: Mapping[GridPosition, int]) -> Neighbours:
    return Neighbours(*(at.get(replace(place, pp=place.pp + way)) for way in (-1, 1)))


def _list(numbers: Collection[int]) -> str:
    return ", ".join(map(str, numbers))
