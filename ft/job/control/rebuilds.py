"""Which process groups have to be built anew after an epoch: a pure function of what its members report."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ft.job.messages import GroupReport


@dataclass(frozen=True)
class RebuildPlan:
    """What becomes of each group in the next epoch.

    Attributes:
        rebuild: built before anything is restored.
        defer: built in the background: no member has ever used them.
        keep: left as they are.
        reasons: name -> why it is not kept, or "" if it is.
    """

    rebuild: list[str]
    defer: list[str]
    keep: list[str]
    reasons: dict[str, str]


def plan_rebuild(reports: Mapping[int, list[GroupReport]], replaced: Iterable[int]) -> RebuildPlan:
    """The least rebuilding that is correct (paper, section VI-D: survivors keep what the fault has not touched).

    A group is kept if and only if no member was replaced, none was in an operation on it, all had started the same
    number of collectives, and every message sent on it had been received: one left over in a connection would be taken
    for a later one. A group that cannot be kept and that nobody has used yet is deferred.

    Args:
        reports: logical rank -> its groups, from every worker of the closed epoch that lives, and from the new ones.
        replaced: logical ranks whose worker is new; what those report of a group only makes the group known.

    Returns:
        the plan, groups in the order in which the lowest logical rank lists them.
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
    if any(report.ranks != ranks for report in said.values()):
        views = "; ".join(f"rank {rank} says {report.ranks}" for rank, report in said.items())
        return f"members are not agreed on: {views}"
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
    # Only pairs that have talked are looked at: of the millions in a group of thousands those are few.
    talked = {(source, int(target)) for source in ranks for target in said[source].sent}
    talked |= {(int(source), target) for target in ranks for source in said[target].received}
    place = {rank: i for i, rank in enumerate(ranks)}
    inside = [pair for pair in talked if pair[0] in place and pair[1] in place]
    for source, target in sorted(inside, key=lambda pair: (place[pair[0]], place[pair[1]])):
        sent = said[source].sent.get(str(target), 0)
        received = said[target].received.get(str(source), 0)
        if sent != received:
            return f"rank {source} sent {sent} to rank {target}, which received {received}"
    return ""


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
