"""The process groups of a layout, without any of its processes: megatron-core makes them, and each is written down."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ft.base.errors import UserError
from ft.state.groups.registry import check_torch

_BACKEND = "ft-recorded"
WORLD, EXITS, FENCE = "WORLD", "EXIT_FLAGS", "FENCE"
"""Over all ranks, beside core's own: torch's default group, those of ``megatron.training.exits`` and of the guard."""


@dataclass(frozen=True)
class Sizes:
    """A layout. ``dp`` is what remains: ranks / (tp cp pp)."""

    ranks: int
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1

    @property
    def dp(self) -> int:
        return self.ranks // (self.tp * self.pp * self.cp)

    def check(self) -> None:
        """Raises ``UserError`` where megatron-core could not lay these ranks out."""
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
    """A process group. ``name``: torch's, as in a run. ``purpose``: core's description. ``ranks``: its members."""

    name: str
    purpose: str
    ranks: list[int]


class _Recorded(dist.ProcessGroup):
    """A process group that connects nothing; torch hands every ``new_group`` to the default one of them."""

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
    """The creator that torch calls for the backend."""
    return _Recorded(options.group_id, WORLD, list(range(options.group_size)), options.group_rank, found)


def groups_of(sizes: Sizes) -> list[GroupSpec]:
    """Every process group of a hot-swapping run in this layout, in the order of creation.

    megatron-core itself is asked, on one process that is rank 0 of a world in which nobody else is.

    Raises:
        UserError: the layout is impossible, or torch too old.
        RuntimeError: this process has process groups of its own.
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
    """All groups but the default one, as the start of a worker makes them."""
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
