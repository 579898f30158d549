"""Simulate the loss of ranks in hot-swap recovery: which process groups have to be rebuilt, and how much work this is.

In a hot-swap, standby processes replace the lost ranks. Each surviving rank reports the state of its process groups;
here these reports are generated. The production planner (``ft.job.control.rebuilds``) then decides which groups to
rebuild, and which to defer until their first use.
"""

import json
import statistics
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from ft.base import bounded_json
from ft.job.control.rebuilds import RebuildPlan, plan_rebuild
from ft.job.messages import GroupReport, WorkerReleased
from ft.lab.simulate.recovery.topology import EXITS, FENCE, WORLD, GroupSpec
from ft.net.codec import Numbers, from_json, to_json
from ft.state.groups.sparse import connections

_READS = 9
"""Number of times that a report is parsed to measure how long that takes."""

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
"""Purposes of the groups that the training steps of a dense model use; most are names in megatron-core's
``parallel_state``. A group with another purpose is connected when it is first used, which may never happen.
"""

USED_BY_EXPERTS = frozenset(
    {"EXPERT_MODEL_PARALLEL_GROUP", "EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP", "EXPERT_DATA_PARALLEL_GROUP"}
)
"""Purposes of the groups that a mixture-of-experts model uses in addition, whichever token dispatcher it has."""

_WITHIN_A_REPLICA = (
    "TENSOR_MODEL_PARALLEL_GROUP",
    "CONTEXT_PARALLEL_GROUP",
    "EXPERT_MODEL_PARALLEL_GROUP",
    "EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP",
    "PIPELINE_MODEL_PARALLEL_GROUP",
)
"""Purposes of the groups of the forward and backward pass, in the order in which ranks block in them. All of these
operations come before the gradient reduction.
"""

_GRADIENTS = "DATA_PARALLEL_GROUP_WITH_CP"


@dataclass(frozen=True)
class Decision:
    """The control plane's rebuild plan, and the cost of computing it on this machine.

    Attributes:
        plan: the plan that the production code returned.
        seconds: time in seconds that the planner took.
        report_bytes: size of one surviving rank's report on the wire, in bytes.
        survivors: number of surviving ranks, each of which sends a report.
        read_s: time in seconds to parse one report; the control plane parses the reports one after the other.
    """

    plan: RebuildPlan
    seconds: float
    report_bytes: int
    survivors: int
    read_s: float


@dataclass(frozen=True)
class Work:
    """The amount of work in connecting a set of groups.

    Attributes:
        groups: number of groups with more than one member.
        memberships: sum of the group sizes.
        connections: number of connected pairs of members (``ft.state.groups.sparse``): all pairs of a small group, and
            those of the first barrier in a large one.
        most_groups: number of groups of the rank that is in the most groups.
        most_connections: number of connections of the rank that has the most connections.
    """

    groups: int
    memberships: int
    connections: int
    most_groups: int
    most_connections: int


def everything(groups: Iterable[GroupSpec]) -> list[str]:
    """Return the names of the groups that a full rebuild connects: those with more than one member."""
    return [group.name for group in groups if len(group.ranks) > 1]


def decide(groups: Sequence[GroupSpec], lost: Collection[int], *, stuck: bool, experts: bool = False) -> Decision:
    """Return the rebuild plan after the loss of some logical ranks.

    Args:
        groups: all process groups of the layout.
        lost: the logical ranks that are lost.
        stuck: True: every survivor is blocked in an operation, waiting for a lost rank or for another blocked rank, as
            after a hang. False: no survivor is in an operation, which gives the smallest possible plan. A loss that is
            detected immediately lies in between: some survivors are in operations that would have completed.
        experts: whether the model is a mixture of experts.
    """
    reports = _reports(groups, frozenset(lost), stuck, USED | USED_BY_EXPERTS if experts else USED)
    began = time.perf_counter()
    plan = plan_rebuild(reports, lost)
    seconds = time.perf_counter() - began
    survivors = [rank for rank in reports if rank not in lost]
    sent, read_s = _sent_and_read(reports[survivors[0]]) if survivors else (0, 0.0)
    return Decision(plan, seconds, sent, len(survivors), read_s)


def work_of(groups: Iterable[GroupSpec], names: Collection[str]) -> Work:
    """Return the work of connecting the named groups."""
    names = frozenset(names)
    chosen = [group.ranks for group in groups if group.name in names and len(group.ranks) > 1]
    own_groups: dict[int, int] = {}
    own_connections: dict[int, int] = {}
    for ranks in chosen:
        for rank in ranks:
            own_groups[rank] = own_groups.get(rank, 0) + 1
            own_connections[rank] = own_connections.get(rank, 0) + connections(len(ranks))
    return Work(
        groups=len(chosen),
        memberships=sum(map(len, chosen)),
        connections=sum(len(ranks) * connections(len(ranks)) // 2 for ranks in chosen),
        most_groups=max(own_groups.values(), default=0),
        most_connections=max(own_connections.values(), default=0),
    )


def blocked_in(groups: Iterable[GroupSpec], lost: Collection[int]) -> dict[int, str]:
    """Return surviving rank -> name of the group in whose operation the rank blocks, for all ranks that block.

    A rank that shares a group of the forward and backward pass with a lost or blocked rank blocks in that group. All
    other ranks reach the gradient reduction, and block there if a member of that group is lost or blocked.
    """
    groups = [group for group in groups if len(group.ranks) > 1]
    waiting: dict[int, str] = {}
    standing = set(lost)
    for purpose in _WITHIN_A_REPLICA:
        _spread([group for group in groups if group.purpose == purpose], waiting, standing)
    _spread([group for group in groups if group.purpose == _GRADIENTS], waiting, standing)
    return waiting


def _spread(groups: list[GroupSpec], waiting: dict[int, str], standing: set[int]) -> None:
    """Block the members of each group that has a lost or blocked member.

    Args:
        groups: groups of one purpose.
        waiting: rank -> group in which the rank blocks; extended.
        standing: ranks that are lost or blocked; extended.
    """
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
    """Return the reports that all workers would send, including the workers that replace the lost ranks."""
    waiting = blocked_in(groups, lost) if stuck else {}
    reports: dict[int, list[GroupReport]] = {rank: [] for group in groups for rank in group.ranks}
    for group in groups:
        was_used, members = group.purpose in used, Numbers(group.ranks)
        for rank in group.ranks:
            ran = was_used and rank not in lost
            in_flight = waiting.get(rank) == group.name
            reports[rank].append(GroupReport(group.name, members, ran, in_flight, int(ran)))
    return reports


def _sent_and_read(groups: list[GroupReport]) -> tuple[int, float]:
    """Return the size of a surviving rank's report in bytes, and the median time to parse it in seconds."""
    text = json.dumps(to_json(WorkerReleased("n0.w0", 0, 0, groups)), separators=(",", ":"))
    took = []
    for _ in range(_READS):
        began = time.perf_counter()
        from_json(WorkerReleased, bounded_json.loads(text, non_finite=True))
        took.append(time.perf_counter() - began)
    return len(text), statistics.median(took)
