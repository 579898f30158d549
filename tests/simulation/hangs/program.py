"""The communication operations of one training step of Megatron, for each rank of a layout."""

from collections import defaultdict
from dataclasses import dataclass, field
from itertools import product

from ft.faults.hang.look import RECV, SEND

_CORE = "megatron/core"


@dataclass(frozen=True)
class Call:
    """One operation of a program.

    Attributes:
        group: name of the process group.
        name: name of the operation.
        sizes: (type, shape) of its tensors.
        site: the line that starts it.
        peer: logical rank of the other end of a message, None for a collective.
        awaited: whether the rank waits for its end before it goes on.
    """

    group: str
    name: str
    sizes: tuple
    site: str
    peer: int | None = None
    awaited: bool = True


Batch = tuple[Call, ...]
"""Operations that are started together; the rank goes on when those that are awaited have ended."""


@dataclass(frozen=True)
class Layout:
    """Sizes of the parallel grid, and of a step.

    Attributes:
        tp: tensor-parallel size.
        cp: context-parallel size.
        dp: data-parallel size.
        pp: number of pipeline stages.
        ep: expert-parallel size; it divides ``dp``. 1: a dense model.
        vpp: number of model chunks of each stage.
        microbatches: number of micro-batches of a step.
    """

    tp: int = 1
    cp: int = 1
    dp: int = 1
    pp: int = 1
    ep: int = 1
    vpp: int = 1
    microbatches: int = 4

    @property
    def world_size(self) -> int:
        return self.tp * self.cp * self.dp * self.pp

    def __str__(self) -> str:
        sizes = (("TP", self.tp), ("CP", self.cp), ("DP", self.dp), ("PP", self.pp), ("EP", self.ep), ("VPP", self.vpp))
        return " x ".join(f"{name}{size}" for name, size in sizes if size > 1) or "one rank"


@dataclass
class Programs:
    """The programs of all ranks.

    Attributes:
        groups: name of each group -> its members.
        steps: logical rank -> the batches of one step.
    """

    groups: dict[str, tuple[int, ...]] = field(default_factory=dict)
    steps: dict[int, list[Batch]] = field(default_factory=dict)


def programs(layout: Layout) -> Programs:
    """Return the programs of all ranks of a layout, with the order of ranks TP, CP, DP, PP."""
    grid = {
        (tp, cp, dp, pp): tp + layout.tp * (cp + layout.cp * (dp + layout.dp * pp))
        for tp, cp, dp, pp in product(range(layout.tp), range(layout.cp), range(layout.dp), range(layout.pp))
    }
    found = Programs()
    kinds = {
        "tp": lambda t, c, d, p: (c, d, p),
        "cp": lambda t, c, d, p: (t, d, p),
        "dp": lambda t, c, d, p: (t, p),
        "pp": lambda t, c, d, p: (t, c, d),
        "mp": lambda t, c, d, p: (c, d),
        "ep": lambda t, c, d, p: (t, c, d // layout.ep, p),
    }
    member: dict[tuple[str, int], str] = {}
    for kind, key in kinds.items():
        classes: dict[tuple, list[int]] = defaultdict(list)
        for place, rank in grid.items():
            classes[key(*place)].append(rank)
        for number, ranks in enumerate(classes.values()):
            name = f"{kind}/{number}"
            found.groups[name] = tuple(sorted(ranks))
            for rank in ranks:
                member[kind, rank] = name
    for place, rank in grid.items():
        found.steps[rank] = _Step(layout, found, member, grid, place, rank).batches()
    return found


class _Step:
    """Builds the program of one rank."""

    def __init__(self, layout: Layout, all_: Programs, member, grid, place, rank: int):
        self._layout, self._all, self._member, self._grid = layout, all_, member, grid
        self._place, self._rank, self._batches = place, rank, []

    def batches(self) -> list[Batch]:
        layout, stage = self._layout, self._place[3]
        self._collective("tp", "broadcast", (64, 8), "tensor_parallel/data.py:76 broadcast_data")
        for chunk, micro in product(range(layout.vpp), range(layout.microbatches)):
            self._pass_on(chunk, stage, forward=True, micro=micro)
        for chunk, micro in product(reversed(range(layout.vpp)), range(layout.microbatches)):
            self._pass_on(chunk, stage, forward=False, micro=micro)
        dp = "distributed/param_and_grad_buffer.py"
        self._collective("dp", "reduce_scatter", (4096,), f"{dp}:380 start_grad_sync")
        if layout.pp > 1:
            self._collective("pp", "all_reduce", (256, 8), "distributed/finalize_model_grads.py:210 embedding_grads")
        self._collective("mp", "all_reduce", (1,), "optimizer/clip_grads.py:120 get_grad_norm_fp32")
        self._collective("dp", "all_gather", (2048,), f"{dp}:260 start_param_sync")
        self._collective("dp", "all_reduce", (2,), "training/training.py:1490 train_step")
        return self._batches

    def _pass_on(self, chunk: int, stage: int, forward: bool, micro: int) -> None:
        layout = self._layout
        ahead, last_chunk = (1, layout.vpp - 1) if forward else (-1, 0)
        first, last = (0, layout.pp - 1) if forward else (layout.pp - 1, 0)
        begins = stage == first and chunk == (0 if forward else layout.vpp - 1)
        ends = stage == last and chunk == last_chunk
        way = "forward" if forward else "backward"
        if layout.pp > 1 and not begins:
            self._message(RECV, (stage - ahead) % layout.pp, f"recv_{way}")
        self._layer(way)
        if layout.pp > 1 and not ends:
            self._message(SEND, (stage + ahead) % layout.pp, f"send_{way}", awaited=False)

    def _layer(self, way: str) -> None:
        line = 100 if way == "forward" else 200
        if self._layout.cp > 1:
            self._ring(line)
        self._collective("tp", "all_gather", (32, 8), f"tensor_parallel/mappings.py:{line} {way}")
        if self._layout.ep > 1:
            self._collective("ep", "all_to_all", (48, 8), f"transformer/moe/token_dispatcher.py:{line} {way}")
            self._collective("ep", "all_to_all", (48, 8), f"transformer/moe/token_dispatcher.py:{line + 30} {way}")
        self._collective("tp", "reduce_scatter", (32, 8), f"tensor_parallel/mappings.py:{line + 50} {way}")

    def _ring(self, line: int) -> None:
        """Exchange keys and values with both neighbours of the context-parallel ring, started together."""
        group = self._member["cp", self._rank]
        ranks = self._all.groups[group]
        at = ranks.index(self._rank)
        after, before = ranks[(at + 1) % len(ranks)], ranks[at - 1]
        site = f"{_CORE}/extensions/context_parallel.py:{line} exchange"
        both = [
            Call(group, SEND, (("bfloat16", (16, 8)),), site, after),
            Call(group, RECV, (("bfloat16", (16, 8)),), site, before),
        ]
        self._batches.append(tuple(both))

    def _message(self, name: str, stage: int, what: str, awaited: bool = True) -> None:
        tp, cp, dp, _ = self._place
        peer, group = self._grid[tp, cp, dp, stage], self._member["pp", self._rank]
        site = f"{_CORE}/pipeline_parallel/p2p_communication.py:{300 if name == SEND else 320} {what}"
        self._batches.append((Call(group, name, (("bfloat16", (64, 8)),), site, peer, awaited),))

    def _collective(self, kind: str, name: str, shape: tuple[int, ...], site: str) -> None:
        group = self._member[kind, self._rank]
        if len(self._all.groups[group]) > 1:
            self._batches.append((Call(group, name, (("bfloat16", shape),), f"{_CORE}/{site}"),))
