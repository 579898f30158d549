"""What is lost when ranks are, and what the production code decides to rebuild then."""

import json
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from ft.job.control.rebuilds import RebuildPlan, plan_rebuild
from ft.job.messages import GroupReport, WorkerReleased
from ft.lab.simulate.recovery.topology import EXITS, FENCE, WORLD, GroupSpec
from ft.net.codec import from_json, to_json

USED = frozenset(
    {
        WORLD,
        EXITS,
        FENCE,
        "DATA_PARALLEL_GROUP_WITH_CP",
        "MODEL_PARALLEL_GROUP",
        "TENSOR_MODEL_PARALLEL_GROUP",
        "PIPELINE_MODEL_PARALLEL_GROUP",
        "CONTEXT_PARALLEL_GROUP",
        "EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP",
        "INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP",
    }
)
"""Purposes of the groups that steps of a dense model use; all others are connected at their first use, if ever."""

USED_BY_EXPERTS = frozenset(
    {"EXPERT_MODEL_PARALLEL_GROUP", "EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP", "EXPERT_DATA_PARALLEL_GROUP"}
)
"""What a model with experts uses besides, whichever way its tokens are dispatched."""

_WITHIN_A_REPLICA = (
    "TENSOR_MODEL_PARALLEL_GROUP",
    "CONTEXT_PARALLEL_GROUP",
    "EXPERT_MODEL_PARALLEL_GROUP",
    "EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP",
    "PIPELINE_MODEL_PARALLEL_GROUP",
)
"""Groups of the forward and backward pass, inner ones first: a rank runs into these before it comes to the others."""

_GRADIENTS = "DATA_PARALLEL_GROUP_WITH_CP"


@dataclass(frozen=True)
class Decision:
    """What the control plane decided, and what that took here.

    Attributes:
        plan: of the production code. seconds: of that code, on this machine.
        report_bytes: of one survivor's report on the wire. survivors: that send one.
        read_s: reading one from the wire, on this machine; the control plane reads one after the other.
    """

    plan: RebuildPlan
    seconds: float
    report_bytes: int
    survivors: int
    read_s: float


@dataclass(frozen=True)
class Work:
    """What connecting some groups comes to.

    Attributes:
        groups: with more than one member. memberships: their sizes, added up. connections: pairs of members that are
            connected, n (n - 1) / 2 in a group of n, as gloo does it.
        most_groups, most_connections: of the rank that has the most of them.
    """

    groups: int
    memberships: int
    connections: int
    most_groups: int
    most_connections: int


def everything(groups: Iterable[GroupSpec]) -> list[str]:
    """Names of the groups that a full rebuild connects: all that have somebody to connect."""
    return [group.name for group in groups if len(group.ranks) > 1]


def decide(groups: Sequence[GroupSpec], lost: Collection[int], *, stuck: bool, experts: bool = False) -> Decision:
    """The rebuild plan after the loss of some logical ranks.

    Args:
        stuck: every survivor has come to the operation in which it waits for a lost rank, or for one that waits itself,
            as after a hang. Otherwise nobody was in an operation, and no fewer groups can be rebuilt. An epoch that is
            closed at once finds survivors in between, some still in operations that would have ended.
        experts: the model has some.
    """
    reports = _reports(groups, frozenset(lost), stuck, USED | USED_BY_EXPERTS if experts else USED)
    began = time.perf_counter()
    plan = plan_rebuild(reports, lost)
    seconds = time.perf_counter() - began
    survivors = [rank for rank in reports if rank not in lost]
    sent, read_s = _sent_and_read(reports[survivors[0]]) if survivors else (0, 0.0)
    return Decision(plan, seconds, sent, len(survivors), read_s)


def work_of(groups: Iterable[GroupSpec], names: Collection[str]) -> Work:
    """Adds up what connecting the named groups takes."""
    names = frozenset(names)
    chosen = [group.ranks for group in groups if group.name in names and len(group.ranks) > 1]
    own_groups: dict[int, int] = {}
    own_connections: dict[int, int] = {}
    for ranks in chosen:
        for rank in ranks:
            own_groups[rank] = own_groups.get(rank, 0) + 1
            own_connections[rank] = own_connections.get(rank, 0) + len(ranks) - 1
    return Work(
        groups=len(chosen),
        memberships=sum(map(len, chosen)),
        connections=sum(len(ranks) * (len(ranks) - 1) // 2 for ranks in chosen),
        most_groups=max(own_groups.values(), default=0),
        most_connections=max(own_connections.values(), default=0),
    )


def blocked_in(groups: Iterable[GroupSpec], lost: Collection[int]) -> dict[int, str]:
    """Surviving rank -> name of the group in which it ends up waiting.

    Who shares a group of the forward and backward pass with a lost rank waits in it; who shares one with somebody who
    waits, waits there; all others get as far as the reduction of gradients.
    """
    groups = [group for group in groups if len(group.ranks) > 1]
    waiting: dict[int, str] = {}
    standing = set(lost)
    for purpose in _WITHIN_A_REPLICA:
        _spread([group for group in groups if group.purpose == purpose], waiting, standing)
    _spread([group for group in groups if group.purpose == _GRADIENTS], waiting, standing)
    return waiting


def _spread(groups: list[GroupSpec], waiting: dict[int, str], standing: set[int]) -> None:
    reached = standing.copy()
    for group in groups:
        if not standing.isdisjoint(group.ranks):
            for rank in group.ranks:
                if rank not in reached:
                    waiting[rank] = group.name
            reached.update(group.ranks)
    standing |= reached


def _reports(
    groups: Sequence[GroupSpec], lost: frozenset[int], stuck: bool, used: frozenset[str]
) -> dict[int, list[GroupReport]]:
    """What every worker would report, the new ones in the seats of lost ranks included."""
    waiting = blocked_in(groups, lost) if stuck else {}
    reports: dict[int, list[GroupReport]] = {rank: [] for group in groups for rank in group.ranks}
    for group in groups:
        was_used = group.purpose in used
        for rank in group.ranks:
            ran = was_used and rank not in lost
            in_flight = waiting.get(rank) == group.name
            reports[rank].append(GroupReport(group.name, group.ranks, ran, in_flight, int(ran)))
    return reports


def _sent_and_read(groups: list[GroupReport]) -> tuple[int, float]:
    """(bytes of a survivor's report, seconds that reading it takes)."""
    text = json.dumps(to_json(WorkerReleased("n0.w0", 0, 0, groups)), separators=(",", ":"))
    began = time.perf_counter()
    from_json(WorkerReleased, json.loads(text))
    return len(text), time.perf_counter() - began
