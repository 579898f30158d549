"""What a repair consists of: the source of each rank's state, the groups to rebuild, and the check of the result.

All functions are pure. :func:`choose` picks the step to restore and the sources (DEADPOOL, section VI-E),
:func:`plan_rebuild` the process groups that have to be rebuilt between two epochs (VI-D), and :func:`violations` checks
the invariants I1 to I4 (V-C) before the first step of a new epoch: all ranks see the same topology (I1), every
optimizer shard has exactly one owner (I2), every owner has a source for its shard (I3), and all ranks continue from the
same step (I4).
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from ft.job.messages import Repair, WorkerRepaired
from ft.job.parts import ELSEWHERE, GroupReport, Holdings, Source


def choose(
    ranks: Collection[int],
    holdings: Mapping[int, Holdings],
    dp_peers: Mapping[int, list[int]],
    spoiled: Collection[int] = (),
    complete: Collection[int] = (),
) -> tuple[int | None, dict[int, Source], str]:
    """Return the largest step for which every logical rank has a complete source.

    Args:
        holdings: logical rank -> the snapshots in the memory of its worker. A rank that is missing here holds none.
        dp_peers: logical rank -> the ranks that hold the same part of the model, including the rank itself.
        spoiled: steps that were tried and turned out to be unusable.
        complete: ranks whose peer copies hold all of their state, so that the holder of a copy is the only source
            needed.

    Returns:
        (step, logical rank -> source, ""), or (None, {}, reason) if there is no such step.
    """
    missing = f"step(s) {', '.join(map(str, spoiled))} are unusable" if spoiled else ""
    for step in steps_held(holdings):
        if step in spoiled:
            continue
        sources, lacking = of_step(step, ranks, holdings, dp_peers, complete)
        if not lacking:
            return step, sources, ""
        missing = missing or f"of step {step}, nobody has all that logical rank(s) {', '.join(map(str, lacking))} need"
    return None, {}, missing or "nobody holds a snapshot"


def steps_held(holdings: Mapping[int, Holdings]) -> list[int]:
    """Return all steps for which any rank holds a snapshot or a peer copy, the newest first."""
    steps = {step for held in holdings.values() for some in (held.own, *held.copies.values()) for step in some}
    return sorted(steps, reverse=True)


def of_step(
    step: int,
    ranks: Collection[int],
    holdings: Mapping[int, Holdings],
    dp_peers: Mapping[int, list[int]],
    complete: Collection[int] = (),
) -> tuple[dict[int, Source], list[int]]:
    """Return (logical rank -> source, sorted ranks without a source) for ``step``. The arguments are those of
    :func:`choose`.
    """
    sources: dict[int, Source] = {}
    lacking, copied, whole = [], _holders(step, holdings, "copies"), _holders(step, holdings, "whole")
    for rank in sorted(ranks):
        peers = dp_peers.get(rank, [rank])
        source = _source(rank, step, holdings, copied.get(rank, []), whole, peers, rank in complete)
        if source is None:
            lacking.append(rank)
        else:
            sources[rank] = source
    return sources, lacking


def _holders(step: int, holdings: Mapping[int, Holdings], which: str) -> dict[int, list[int]]:
    """Return logical rank -> sorted ranks of other workers that hold its snapshot of ``step``.

    ``which``: the field of the holdings, "copies" or "whole".
    """
    found: dict[int, list[int]] = {}
    for holder, held in sorted(holdings.items()):
        for owner, steps in getattr(held, which).items():
            if step in steps and owner != holder:
                found.setdefault(owner, []).append(holder)
    return found


def _source(
    rank: int,
    step: int,
    holdings: Mapping[int, Holdings],
    holders: list[int],
    whole: Mapping[int, list[int]],
    peers: list[int],
    is_complete: bool,
) -> Source | None:
    own = holdings.get(rank)
    if own is not None and step in own.own:
        return Source(rank, rank)
    if rank in whole:
        return Source(whole[rank][0], whole[rank][0], rank)
    if not holders:
        return None
    others = [r for r in peers if r != rank]
    if not others:
        return Source(holders[0], holders[0])  # without data parallelism the peer copy holds the whole state
    holder = next((r for r in holders if r in others), holders[0])
    if alive := [r for r in others if r in holdings and step in holdings[r].own]:
        return Source(holder, alive[0])
    if served := [r for r in others if r in whole]:
        return Source(holder, whole[served[0]][0], served[0])
    return Source(holder, holder) if is_complete else None


@dataclass(frozen=True)
class RebuildPlan:
    """What happens to each process group in the next epoch.

    Attributes:
        rebuild: names of the groups to rebuild before any state is restored.
        defer: names of the groups to rebuild in the background, because no surviving member has used them.
        keep: names of the groups to keep.
        reasons: name -> why the group is not kept, or "" if it is kept.
    """

    rebuild: list[str]
    defer: list[str]
    keep: list[str]
    reasons: dict[str, str]


def plan_rebuild(reports: Mapping[int, list[GroupReport]], replaced: Iterable[int]) -> RebuildPlan:
    """Return the smallest correct set of rebuilds; survivors keep the groups that the fault has not affected.

    This follows DEADPOOL, section VI-D. A group is kept if and only if no member was replaced, no member was in an
    operation on it, all members had started the same number of collectives, and every message sent on it had been
    received (a message that remains in a connection would be taken for a later one). A group that cannot be kept and
    that no surviving member has used is deferred.

    Args:
        reports: logical rank -> reports on its groups, from every live worker of the closed epoch and every new worker.
        replaced: logical ranks whose worker is new. Their reports only make the names of the groups known.

    Returns:
        The plan. Groups are in the order in which the lowest logical rank lists them.
    """
    replaced = set(replaced)
    members: dict[str, list[int]] = {}
    said: dict[str, dict[int, GroupReport]] = {}
    for rank in sorted(reports):
        for report in reports[rank]:
            members.setdefault(report.name, report.ranks)
            said.setdefault(report.name, {})[rank] = report
    plan = RebuildPlan([], [], [], {})
    for name, ranks in members.items():
        survivors = {rank: report for rank, report in said[name].items() if rank not in replaced}
        reason = _reason_against_keeping(ranks, survivors, replaced)
        plan.reasons[name] = reason
        used = any(report.used for report in survivors.values())
        target = plan.keep if not reason else plan.rebuild if used else plan.defer
        target.append(name)
    return plan


def _reason_against_keeping(ranks: list[int], said: dict[int, GroupReport], replaced: set[int]) -> str:
    if len(ranks) == 1:
        return ""
    # The members are the same object in most reports (``ft.net.codec.Numbers``); comparing lists takes longer.
    if any(report.ranks is not ranks and report.ranks != ranks for report in said.values()):
        views = "; ".join(f"rank {rank} says {report.ranks}" for rank, report in said.items())
        return f"its members are reported differently: {views}"
    if gone := [rank for rank in ranks if rank in replaced]:
        return f"replaced: {_ranks(gone)}"
    if silent := [rank for rank in ranks if rank not in said]:
        return f"unknown to {_ranks(silent)}"
    if busy := [rank for rank in ranks if said[rank].in_flight]:
        return f"in an operation: {_ranks(busy)}"
    counts = {rank: said[rank].collectives for rank in ranks}
    if len(set(counts.values())) > 1:
        ahead, behind = max(counts, key=counts.__getitem__), min(counts, key=counts.__getitem__)
        return f"rank {ahead} started {counts[ahead]} collectives, rank {behind} {counts[behind]}"
    return _first_lost_message(ranks, said)


def _first_lost_message(ranks: list[int], said: dict[int, GroupReport]) -> str:
    # Check only pairs that have communicated: few of the millions of pairs in a group of thousands.
    talked = {(source, target) for source in ranks for target in said[source].sent}
    talked |= {(source, target) for target in ranks for source in said[target].received}
    place = {rank: i for i, rank in enumerate(ranks)}
    inside = [pair for pair in talked if pair[0] in place and pair[1] in place]
    for source, target in sorted(inside, key=lambda pair: (place[pair[0]], place[pair[1]])):
        sent = said[source].sent.get(target, 0)
        received = said[target].received.get(source, 0)
        if sent != received:
            return f"rank {source} sent {sent} to rank {target}, which received {received}"
    return ""


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def violations(repair: Repair, reports: Mapping[int, WorkerRepaired], shards: Mapping[int, list[str]]) -> list[str]:
    """Return one sentence for each violation; an empty list if I1 to I4 hold.

    ``shards``: logical rank -> names of the optimizer shards that it owned when its model was first built.
    """
    ordered = sorted(reports.items())
    found = _topology(ordered)
    owners: dict[str, list[int]] = {}
    for rank, report in ordered:
        for shard in report.shards:
            owners.setdefault(shard, []).append(rank)
    wanted = {shard for names in shards.values() for shard in names}
    shared = [(shard, who) for shard, who in sorted(owners.items()) if len(who) > 1]
    found += [f"I2 (shard completeness): {shard} is owned by ranks {_list(who)}" for shard, who in shared]
    found += [f"I2 (shard completeness): nobody owns {shard}" for shard in sorted(wanted - owners.keys())]
    for rank, report in ordered:
        if report.shards and not _has_optimizer(rank, repair, report.sources.get("owned", "")):
            found.append(f"I3 (optimizer availability): rank {rank} has no source of its optimizer shard")
    for rank, report in ordered:
        if report.step != repair.step:
            found.append(f"I4 (step atomicity): rank {rank} is at step {report.step}, all go on from {repair.step}")
    return found


def _has_optimizer(rank: int, repair: Repair, how: str) -> bool:
    """Return whether the rank has a source for its optimizer shard.

    Only a rank whose state is rebuilt from other ranks' weights (CheckFree) may begin with a new optimizer state, and
    it has to. A replica that fetches its state from another one has none until then.
    """
    if repair.position_of is not None:
        return how == ELSEWHERE
    if rank in repair.rebuilt or rank in repair.lent:
        return how.startswith("rebuilt:")
    return rank in repair.sources and bool(how) and not how.startswith("rebuilt:")


def _topology(ordered: list[tuple[int, WorkerRepaired]]) -> list[str]:
    found = []
    views: dict[str, list[int]] = {}
    for rank, report in ordered:
        views.setdefault(report.topology, []).append(rank)
    if len(views) > 1:
        most = max(views, key=lambda view: len(views[view]))
        others = [f"ranks {_list(who)} see {view}" for view, who in sorted(views.items()) if view != most]
        found.append(
            f"I1 (topology consistency): ranks {_list(views[most])} see topology {most}, but {'; '.join(others)}"
        )
    for rank, report in ordered:
        if report.rank != rank:
            found.append(f"I1 (topology consistency): {report.worker} in seat {rank} says it is rank {report.rank}")
    return found


def _list(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))
