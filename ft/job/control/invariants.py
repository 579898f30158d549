"""Check of the invariants I1 to I4 (DEADPOOL, section V-C) before the first step of a new epoch.

All ranks see the same topology (I1), every optimizer shard has exactly one owner (I2), every owner has a source for its
shard (I3), and all ranks continue from the same step (I4).
"""

from collections.abc import Mapping

from ft.job.messages import ELSEWHERE, Repair, WorkerRepaired


def violations(repair: Repair, reports: Mapping[int, WorkerRepaired], shards: Mapping[int, list[str]]) -> list[str]:
    """Return one sentence for each violation; an empty list if I1 to I4 hold.

    Args:
        repair: the repair that was ordered.
        reports: logical rank -> the report of the worker that holds this rank.
        shards: logical rank -> names of the optimizer shards that it owned when its model was first built.
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
    if repair.teller is not None:
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
