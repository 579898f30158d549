"""The process groups of a parallel layout, recorded from megatron-core without other processes.

``ft simulate recovery`` uses them to find out which groups a hot-swap has to rebuild. megatron-core creates its groups
in this process over a default group that records every group and connects none.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch.distributed as dist

from ft.base.errors import UserError
from ft.state.groups.seam import BACKEND, take_over
from ft.state.groups.tree import Tree

WORLD, EXITS, FENCE = "WORLD", "EXIT_FLAGS", "FENCE"
"""Groups that megatron-core does not create: torch's default group, and the groups of two trees over all ranks
(``ft.state.groups.tree``): one for the exit flags of ``megatron.ft_trainer.exits``, and one for the barrier with which
hot-swap commits a step (the fence).
"""


@dataclass(frozen=True)
class Sizes:
    """A parallel layout.

    Attributes:
        ranks: number of ranks.
        tp: tensor parallel size.
        pp: pipeline parallel size.
        cp: context parallel size.
        ep: expert parallel size.
    """

    ranks: int
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1

    @property
    def dp(self) -> int:
        """Return the data-parallel size: ranks / (tp cp pp)."""
        return self.ranks // (self.tp * self.pp * self.cp)

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

    def __str__(self) -> str:
        sizes = {"TP": self.tp, "CP": self.cp, "EP": self.ep, "DP": self.dp, "PP": self.pp}
        return " ".join(f"{name}{size}" for name, size in sizes.items() if size > 1 or name == "DP")


@dataclass(frozen=True)
class GroupSpec:
    """A recorded process group.

    Attributes:
        name: torch's name of the group, the same as in a real run.
        purpose: megatron-core's description of the group.
        ranks: global ranks of the members.
    """

    name: str
    purpose: str
    ranks: list[int]


class _Recorder:
    """Records each process group that megatron-core creates, and creates a group without connections for it.

    Implements ``ft.state.groups.seam.Maker``.

    Args:
        rank: global rank of this process.

    Attributes:
        found: the recorded groups, in the order of their creation.
    """

    def __init__(self, rank: int):
        self._rank = rank
        self.found: list[GroupSpec] = []

    def default(self, options) -> dist.ProcessGroup:
        """Record and return the default group, whose members are all ranks.

        Args:
            options: torch's description of the group: its name and its size.
        """
        return self.new_group(list(range(options.group_size)), None, options.group_id, WORLD, BACKEND)

    def new_group(self, ranks, timeout, name, desc, backend):
        """Record a group. Return it, or None if this process is not a member. See ``Maker.new_group``."""
        self.found.append(GroupSpec(name, desc, ranks))
        if self._rank not in ranks:
            return None
        return _Recorded(name, desc, ranks.index(self._rank), len(ranks), self)


class _Recorded(dist.ProcessGroup):
    """A process group without connections, on which no operation can run.

    The class has no method ``new_group``, because torch would call it with other arguments than ``Maker.new_group``
    takes.

    Args:
        name: name of the group.
        purpose: description of the group.
        rank: rank of this process in the group.
        size: number of members.
        maker: creates the groups that the program creates later.
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


def groups_of(sizes: Sizes) -> list[GroupSpec]:
    """Return every process group of a hot-swap run in this layout, in the order of creation.

    megatron-core creates the groups in this process, which acts as rank 0; the other ranks do not exist.

    Raises:
        UserError: the layout is impossible, or this release of torch creates process groups in an unknown way.
        RuntimeError: this process already has process groups.
    """
    sizes.check()
    take_over()
    if dist.is_initialized():
        raise RuntimeError("torch.distributed is initialised in this process already")
    recorder = _Recorder(rank=0)
    with _world_of(sizes.ranks, recorder):
        make_groups(sizes)
    return recorder.found


def make_groups(sizes: Sizes) -> None:
    """Create all process groups except the default group, as a training process does at its start."""
    from megatron.ft_trainer.arguments.core_options import CoreOptions
    from megatron.ft_trainer.arguments.layout import Layout
    from megatron.ft_trainer.initialize import init_model_parallel

    layout = Layout(
        world_size=sizes.ranks,
        tp=sizes.tp,
        cp=sizes.cp,
        ep=sizes.ep,
        etp=sizes.tp,
        dp=sizes.dp,
        pp=sizes.pp,
        vpp=None,
    )
    init_model_parallel(CoreOptions(), layout)
    for purpose in (EXITS, FENCE):
        Tree(purpose)


@contextmanager
def _world_of(size: int, recorder: _Recorder) -> Iterator[None]:
    from megatron.core import parallel_state

    dist.init_process_group(BACKEND, store=dist.HashStore(), rank=0, world_size=size, pg_options=recorder.default)
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
