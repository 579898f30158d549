"""Where the state of a recovery comes from: peer copies first, CheckFree next, the persistent checkpoint last.

One pure function. CheckFree (its paper, section 4) rebuilds a pipeline stage of which nobody has a state any more from
the stages beside it; it costs a jump of the loss, and a warm restart costs every step since the last checkpoint.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from ft.job.control import sources
from ft.job.control.state import Place
from ft.job.messages import Holdings, Neighbours, Source

COPIES, REBUILD, RESTART = "copies", "rebuild", "restart"
"""The rungs, from the first to the last that is tried."""

MIDDLE, PLUS = "middle", "plus"
"""Which stages CheckFree may rebuild: those with two neighbours; with CheckFree+ the first and the last as well."""

AGAINST = "CheckFree cannot help"
LAST_RUNG = "what is left is the last persistent checkpoint"


@dataclass(frozen=True)
class Memory:
    """What is in the memory of those that live.

    Attributes:
        ranks: all logical ranks. holdings, dp_peers, complete: as of :func:`ft.job.control.sources.choose`.
        spoiled: steps that were tried and found unusable. unusable: logical rank -> steps that it found so.
        unbuildable: steps at which a stage could not be rebuilt.
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
    """The pipeline, where CheckFree was asked for.

    Attributes:
        checkfree: MIDDLE, PLUS, or "" where it was not. places: logical rank -> its place.
        rebuilt: stage -> step at which it was last rebuilt: what it has of that very step may be made anew.
    """

    checkfree: str = ""
    places: Mapping[int, Place] = field(default_factory=dict)
    rebuilt: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Rung:
    """What is done.

    Attributes:
        name: COPIES, REBUILD or RESTART. step: the one to restore, None for a restart.
        sources: by logical rank, of all but the ``rebuilt``. rebuilt: logical rank -> whose blocks it is made from.
        reason: in words; of a restart, why neither copies nor CheckFree will do.
    """

    name: str
    step: int | None
    reason: str
    sources: Mapping[int, Source] = field(default_factory=dict)
    rebuilt: Mapping[int, Neighbours] = field(default_factory=dict)


def decide(memory: Memory, stages: Stages) -> Rung:
    """The first rung that bears.

    Copies of an earlier step go before a rebuild at a later one: what they cost is a step. With CheckFree+ a rebuild
    that was begun at the very step is begun anew: it changes the neighbour that has the other copy of embedding or head
    too, and snapshots of both may be of before and after.
    """
    step, found, why = sources.choose(memory.ranks, memory.holdings, memory.dp_peers, memory.spoiled, memory.complete)
    if step is not None:
        if stages.checkfree == PLUS and step in stages.rebuilt.values():
            rung = _rebuild(step, memory, stages, again=True)
            if rung.name == REBUILD:
                return rung
        return Rung(COPIES, step, f"step {step} is the newest that every logical rank has a source of", found)
    lost = f"both copies lost: {why}"
    if not stages.checkfree:
        return Rung(RESTART, None, lost)
    against = ""
    for step in sources.steps_held(memory.holdings):
        for again in (True, False) if stages.checkfree == PLUS else (False,):
            rung = _rebuild(step, memory, stages, again=again)
            if rung.name == REBUILD:
                return rung
        against = against or rung.reason
    against = against or "there is no stage to rebuild from"
    return Rung(RESTART, None, f"{lost}; {AGAINST}: {against}; {LAST_RUNG}")


def _rebuild(step: int, memory: Memory, stages: Stages, *, again: bool) -> Rung:
    """REBUILD at ``step``, or RESTART with what speaks against it. ``again``: what was rebuilt at it as well."""
    if step in memory.unbuildable:
        return Rung(RESTART, None, f"at step {step} the neighbours' blocks turned out unusable")
    if unknown := sorted(rank for rank in memory.ranks if rank not in stages.places):
        return Rung(RESTART, None, f"logical rank(s) {_list(unknown)} have not said which stage they are of")
    found, lacking = sources.of_step(step, memory.ranks, memory.holdings, memory.dp_peers, memory.complete)
    lacking = sorted({*lacking, *(rank for rank in memory.ranks if step in memory.unusable.get(rank, ()))})
    members: dict[int, list[int]] = {}
    for rank in sorted(memory.ranks):
        members.setdefault(stages.places[rank].pp, []).append(rank)
    lost = {stages.places[rank].pp for rank in lacking}
    lost |= {stage for stage, at in stages.rebuilt.items() if again and at == step}
    against = _against(step, sorted(lost), lacking, members, stages)
    if against:
        return Rung(RESTART, None, against)
    at = {place: rank for rank, place in stages.places.items()}
    rebuilt = {rank: _neighbours(stages.places[rank], at) for stage in sorted(lost) for rank in members[stage]}
    kept = {rank: source for rank, source in found.items() if rank not in rebuilt}
    reason = f"of step {step}, stage {_list(sorted(lost))} is rebuilt from the stages beside (CheckFree)"
    return Rung(REBUILD, step, reason, kept, rebuilt)


def _against(
    step: int, lost: list[int], lacking: Collection[int], members: Mapping[int, list[int]], stages: Stages
) -> str:
    """Why these stages cannot be rebuilt, "" if they can."""
    last = max(members)
    for stage in lost:
        if stage + 1 in lost:
            return (
                f"of step {step}, the adjacent stages {stage} and {stage + 1} are both lost, and each needs the other"
            )
        if stage in (0, last) and (stages.checkfree != PLUS or last == 0):
            which = "first" if stage == 0 else "last"
            return f"of step {step}, stage {stage} is lost, the {which} one, which only CheckFree+ rebuilds"
        left = [rank for rank in members[stage] if rank not in lacking]
        if left and stages.rebuilt.get(stage) != step:
            return f"of step {step}, stage {stage} is not lost whole: logical rank(s) {_list(left)} have their part"
        counts = {s: _blocks(members[s], stages) for s in (stage - 1, stage, stage + 1) if s in members}
        if len(set(counts.values())) > 1 or any(len(blocks) > 1 for blocks in counts.values()):
            told = ", ".join(f"stage {s}: {_list(sorted(blocks))}" for s, blocks in sorted(counts.items()))
            return f"the stages do not hold as many transformer layers each ({told})"
    return ""


def _blocks(ranks: Collection[int], stages: Stages) -> frozenset[int]:
    return frozenset(stages.places[rank].blocks for rank in ranks)


def _neighbours(place: Place, at: Mapping[Place, int]) -> Neighbours:
    beside = (at.get(Place(place.pp + way, place.tp, place.dp, place.cp, place.blocks)) for way in (-1, 1))
    return Neighbours(*beside)


def _list(numbers: Collection[int]) -> str:
    return ", ".join(map(str, numbers))
