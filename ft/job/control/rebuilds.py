"""Choice of the process groups that have to be rebuilt between two epochs: a pure function of the members' reports.

An epoch is a version of the map logical rank -> worker.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ft.job.messages import GroupReport


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
