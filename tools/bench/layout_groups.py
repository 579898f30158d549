"""The process groups of a parallel layout, recorded from megatron-core without other processes, and those that a
recovery rebuilds. ``rebuild.py`` measures how long that takes, ``connections.py`` counts the connections.
"""

import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

ROOT = Path(__file__).parent.parent.parent
sys.path[:0] = [str(ROOT)]

from ft.base.errors import UserError  # noqa: E402
from ft.job.control.repairs import RebuildPlan, plan_rebuild  # noqa: E402
from ft.job.parts import GroupReport  # noqa: E402
from ft.net.codec import Numbers  # noqa: E402
from ft.state.groups.backends import connections  # noqa: E402
from ft.state.groups.registry import BACKEND, take_over  # noqa: E402
from ft.state.groups.tree import Tree  # noqa: E402

WORLD, EXITS, FENCE = "WORLD", "EXIT_FLAGS", "FENCE"
"""Groups that megatron-core does not create: torch's default group, and the groups of two trees over all ranks
(``ft.state.groups.tree``): one for the exit flags of ``megatron.ft_trainer.exits``, and one for the barrier with which
hot-swap commits a step (the fence).
"""
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
USED = frozenset(
    {
        *(WORLD, EXITS, FENCE, _GRADIENTS, "MODEL_PARALLEL_GROUP", "TENSOR_MODEL_PARALLEL_GROUP"),
        *("PIPELINE_MODEL_PARALLEL_GROUP", "CONTEXT_PARALLEL_GROUP", "EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP"),
        "INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP",
    }
)
"""Purposes of the groups that the training steps of a dense model use; most are names in megatron-core's
``parallel_state``. A group with another purpose is connected when it is first used, which may never happen.
"""


@dataclass(frozen=True)
class Sizes:
    """A parallel layout: number of ranks, and tensor, pipeline, context and expert parallel size."""

    ranks: int
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1

    def check(self) -> None:
        """Check that megatron-core can lay out these ranks.

        Raises:
            UserError: the sizes do not divide the number of ranks.
        """
        for factor, names in (
            (self.tp * self.pp * self.cp, "tp x pp x cp"),
            (self.tp * self.ep * self.pp, "tp x ep x pp"),
        ):
            if self.ranks % factor:
                raise UserError(
                    f"{self.ranks} ranks are not a multiple of {names} = {factor}",
                    "give sizes whose product divides them",
                )


@dataclass(frozen=True)
class GroupSpec:
    """A recorded process group: torch's name of it, megatron-core's description, and the members' global ranks."""

    name: str
    purpose: str
    ranks: list[int]


@dataclass(frozen=True)
class Work:
    """The amount of work in connecting a set of groups.

    Attributes:
        groups: number of groups with more than one member.
        memberships: sum of the group sizes.
        connections: number of connected pairs of members (``ft.state.groups.backends``): all pairs of a small
            group, and those of the first barrier in a large one.
        most_groups: number of groups of the rank that is in the most groups.
        most_connections: number of connections of the rank that has the most connections.
    """

    groups: int
    memberships: int
    connections: int
    most_groups: int
    most_connections: int


# --- the groups of a layout -------------------------------------------------------------------------------------------


def groups_of(sizes: Sizes) -> list[GroupSpec]:
    """Return every process group of a hot-swap run in this layout, in the order of creation.

    megatron-core creates the groups in this process, which acts as rank 0; the other ranks do not exist.

    Raises:
        UserError: the layout is impossible, or this release of torch creates process groups in an unknown way.
    """
    sizes.check()
    take_over()
    recorder = _Recorder(rank=0)
    with _world_of(sizes.ranks, recorder):
        make_groups(sizes)
    return recorder.found


def make_groups(sizes: Sizes) -> None:
    """Create all process groups except the default group, as a training process does at its start."""
    from megatron.ft_trainer.arguments.core_options import CoreOptions
    from megatron.ft_trainer.arguments.layout import Layout
    from megatron.ft_trainer.initialize import init_model_parallel

    dp = sizes.ranks // (sizes.tp * sizes.pp * sizes.cp)
    shared = {"tp": sizes.tp, "cp": sizes.cp, "ep": sizes.ep, "etp": sizes.tp, "dp": dp, "pp": sizes.pp, "vpp": None}
    init_model_parallel(CoreOptions(), Layout(world_size=sizes.ranks, **shared))
    for purpose in (EXITS, FENCE):
        Tree(purpose)


@contextmanager
def _world_of(size: int, recorder: "_Recorder") -> Iterator[None]:
    from megatron.core import parallel_state

    dist.init_process_group(BACKEND, store=dist.HashStore(), rank=0, world_size=size, pg_options=recorder.default)
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


class _Recorder:
    """Records each process group that is created (in ``found``), and creates a group without connections for it.

    It makes groups as ``ft.state.groups.registry.Groups`` does.
    """

    def __init__(self, rank: int):
        self._rank = rank
        self.found: list[GroupSpec] = []

    def default(self, options) -> dist.ProcessGroup:
        """Record and return the default group, whose members are all ranks."""
        return self.new_group(list(range(options.group_size)), None, options.group_id, WORLD, BACKEND)

    def new_group(self, ranks, timeout, name, desc, backend, options=None):
        """Record a group. Return it, or None if this process is not a member. See ``Groups.new_group``."""
        self.found.append(GroupSpec(name, desc, ranks))
        if self._rank not in ranks:
            return None
        return _Recorded(name, desc, ranks.index(self._rank), len(ranks), self)


class _Recorded(dist.ProcessGroup):
    """A process group without connections, on which no operation can run. ``maker`` creates the groups that the program
    creates later: with a method ``new_group`` torch would call it with other arguments than ``Groups.new_group`` takes.
    """

    def __init__(self, name: str, purpose: str, rank: int, size: int, maker: _Recorder):
        super().__init__(rank, size)
        self._name, self._purpose, self.maker = name, purpose, maker

    @property
    def group_name(self) -> str:
        return self._name

    @property
    def group_desc(self) -> str:
        return self._purpose

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, desc: str) -> None:
        self._purpose = desc

    def name(self) -> str:
        return "ft"

    _get_backend_name = name

    def shutdown(self) -> None:
        return None

    abort = shutdown


# --- what a recovery rebuilds -----------------------------------------------------------------------------------------


def everything(groups: Iterable[GroupSpec]) -> list[str]:
    """Return the names of the groups that a full rebuild connects: those with more than one member."""
    return [group.name for group in groups if len(group.ranks) > 1]


def decide(groups: Sequence[GroupSpec], lost: Collection[int], *, stuck: bool) -> RebuildPlan:
    """Return what production rebuilds after the loss of some logical ranks of a dense model.

    Args:
        groups: all process groups of the layout.
        lost: the logical ranks that are lost.
        stuck: True: every survivor is blocked in an operation, waiting for a lost rank or for another blocked rank, as
            after a hang. False: no survivor is in an operation, which gives the smallest possible plan. A loss that is
            detected immediately lies in between: some survivors are in operations that would have completed.
    """
    waiting = blocked_in(groups, lost) if stuck else {}
    reports: dict[int, list[GroupReport]] = {rank: [] for group in groups for rank in group.ranks}
    for group in groups:
        members = Numbers(group.ranks)
        for rank in group.ranks:
            ran = group.purpose in USED and rank not in lost
            reports[rank].append(GroupReport(group.name, members, ran, waiting.get(rank) == group.name, int(ran)))
    return plan_rebuild(reports, lost)


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
    for purpose in (*_WITHIN_A_REPLICA, _GRADIENTS):
        reached = standing.copy()
        for group in groups:
            if group.purpose == purpose and not standing.isdisjoint(group.ranks):
                waiting.update((rank, group.name) for rank in group.ranks if rank not in reached)
                reached.update(group.ranks)
        standing = reached
    return waiting
