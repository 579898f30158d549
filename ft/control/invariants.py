"""The invariants of section V-C, checked before any step of a new epoch begins."""

from collections.abc import Mapping

from ft.messages import Repair, WorkerRepaired


def violations(repair: Repair, reports: Mapping[int, WorkerRepaired], shards: Mapping[int, list[str]]) -> list[str]:
    """Sentences, one for each violation; empty when I1 to I4 hold.

    Args:
        reports: by the logical rank of the seat. shards: names of the shards each logical rank owned at the start.
    """
    found = []
    topologies = {report.topology for report in reports.values()}
    if len(topologies) > 1:
        found.append(
            f"I1 (topology): workers see {len(topologies)} different topologies: "
            + ", ".join(f"rank {r} {report.topology}" for r, report in sorted(reports.items()))
        )
    found += [
        f"I1 (topology): the worker in seat {rank} says it is rank {report.rank}"
        for rank, report in sorted(reports.items())
        if report.rank != rank
    ]
    owners: dict[str, list[int]] = {}
    for rank, report in sorted(reports.items()):
        for shard in report.shards:
            owners.setdefault(shard, []).append(rank)
    wanted = {shard for names in shards.values() for shard in names}
    found += [
        f"I2 (shard completeness): {shard} is owned by ranks {who}" for shard, who in owners.items() if len(who) > 1
    ]
    found += [f"I2 (shard completeness): nobody owns {shard}" for shard in sorted(wanted - owners.keys())]
    found += [
        f"I3 (optimizer availability): rank {rank} names no source of its shard"
        for rank, report in sorted(reports.items())
        if not report.sources.get("owned")
    ]
    found += [
        f"I4 (step atomicity): rank {rank} is at step {report.step}, the restore step is {repair.step}"
        for rank, report in sorted(reports.items())
        if report.step != repair.step
    ]
    return found
