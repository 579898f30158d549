"""The process groups of a layout, recorded from megatron-core without starting any of its processes."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ft.base.errors import UserError
from ft.state.groups.registry import check_torch

_BACKEND = "ft-recorded"
WORLD, EXITS, FENCE = "WORLD", "EXIT_FLAGS", "FENCE"
"""Groups over all ranks beside megatron-core's own: torch's default group, the exit flags of
``megatron.training.exits``, and the recovery fence.
"""


@dataclass(frozen=True)
class Sizes:
    """A parallel layout. ``dp`` is derived: ranks / (tp cp pp)."""

    ranks: int
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1

    @property
    def dp(self) -> int:
        return self.ranks // (self.tp * self.pp * self.cp)

    def check(self) -> None:
        """Raise ``UserError`` if megatron-core cannot lay out these ranks."""
        for factor, names in (
            (self.tp * self.pp * self.cp, "tp x pp x cp"),
            (self.tp * self.ep * self.pp, "tp x ep x pp"),
        ):
            if self.ranks % factor:
                raise UserError(
                    f"{self.ranks} ranks are no multiple of {names} = {factor}", "give sizes whose product divides them"
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
        ranks: its members.
    """

    name: str
    purpose: str
    ranks: list[int]


class _Recorded(dist.ProcessGroup):
    """A process group that connects nothing and records every ``new_group``, which torch delegates to the default
    group.
    """

    def __init__(self, name: str, purpose: str, ranks: list[int], rank: int, found: list[GroupSpec]):
        super().__init__(rank, len(ranks))
        self._name, self._purpose, self._own, self._found = name, purpose, rank, found
        found.append(GroupSpec(name, purpose, ranks))

    def new_group(self, ranks, timeout=None, pg_options=None, group_name="", group_desc=None, backend=None):
        ranks = list(ranks)
        if self._own in ranks:
            return _Recorded(group_name, group_desc, ranks, ranks.index(self._own), self._found)
        self._found.append(GroupSpec(group_name, group_desc, ranks))
        return None

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


def _make_default(options, found: list[GroupSpec]) -> _Recorded:
    """Create the default group; torch calls this for the registered backend."""
    return _Recorded(options.group_id, WORLD, list(range(options.group_size)), options.group_rank, found)


def groups_of(sizes: Sizes) -> list[GroupSpec]:
    """Return every process group of a hot-swap run in this layout, in the order of creation.

    megatron-core creates them in this process, which acts as rank 0 of a world without other processes.

    Raises:
        UserError: the layout is impossible, or torch is too old.
        RuntimeError: this process already has process groups.
    """
    sizes.check()
    check_torch(torch.__version__)
    if dist.is_initialized():
        raise RuntimeError("torch.distributed is initialised in this process already")
    found: list[GroupSpec] = []
    with _world_of(sizes.ranks, found):
        make_groups(sizes)
    return found


def make_groups(sizes: Sizes) -> None:
    """Create all groups but the default one, as a worker does at start."""
    from megatron.training.arguments.layout import Layout
    from megatron.training.arguments.parallel import ParallelOptions
    from megatron.training.initialize import init_model_parallel

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
    init_model_parallel(ParallelOptions(), layout)
    for purpose in (EXITS, FENCE):
        dist.new_group(backend="gloo", group_desc=purpose)


@contextmanager
def _world_of(size: int, found: list[GroupSpec]) -> Iterator[None]:
    from megatron.core import parallel_state

    if _BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(_BACKEND, _make_default, extended_api=True, devices=["cpu"])
    dist.init_process_group(_BACKEND, store=dist.HashStore(), rank=0, world_size=size, pg_options=found)
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
