"""Parameters of a simulated run, drawn from its seed."""

import random
from dataclasses import dataclass, field, replace
from functools import cache

from ft.job.control.recovery_plan import MIDDLE, PLUS
from ft.job.control.state import Place
from ft.job.control.timeouts import Timeouts
from ft.state.snapshot.peers import peers_of

TIMEOUTS = Timeouts(
    agent_beat_s=0.5,
    silent_start_s=5.0,
    stall_s=4.0,
    start_s=12.0,
    collective_s=6.0,
    drain_s=8.0,
    verdict_s=12.0,
    repair_s=10.0,
    assemble_s=14.0,
    ready_s=18.0,
    mute_s=30.0,
    leave_s=5.0,
    join_s=40.0,
).check()
"""Production's timeouts, shortened in their order: virtual seconds cost real time, and no property depends on their
length.
"""


@dataclass(frozen=True)
class Shape:
    """The layout of a run: its logical ranks, nodes and peer copies.

    Attributes:
        world_size: number of logical ranks.
        dp: number of logical ranks that hold the same part of the model; 1: no data parallelism.
        near: ranks with the same part are consecutive, most often on one node; otherwise they are far apart.
        copies: peer copies of each logical rank's snapshot.
        nodes: (seats, standbys) of each node.
        max_restarts: warm restarts allowed.
        hot_swap: hot-swap is enabled.
        groups: process group -> its logical ranks.
        checkfree: parts of the model are pipeline stages, and lost stages may be rebuilt from adjacent ones: ""
            (never), or ``MIDDLE`` or ``PLUS`` of ``ft.job.control.recovery_plan``.
    """

    world_size: int
    dp: int
    near: bool
    copies: int
    nodes: tuple[tuple[int, int], ...]
    max_restarts: int
    hot_swap: bool = True
    groups: dict[str, list[int]] = field(default_factory=dict, compare=False)
    checkfree: str = ""

    def part_of(self, rank: int) -> int:
        """Return which part of the model the rank holds."""
        return rank // self.dp if self.near else rank % (self.world_size // self.dp)

    def place_of(self, rank: int) -> Place:
        """Return the rank's place in the pipeline."""
        return Place(self.part_of(rank), 0, self.dp_peers(rank).index(rank), 0, 1)

    def dp_peers(self, rank: int) -> list[int]:
        return _peers(self, rank)

    def copies_at(self, rank: int) -> list[int]:
        return _copies(self, rank)

    def groups_of(self, rank: int) -> list[str]:
        return [name for name, ranks in self.groups.items() if rank in ranks]


@cache
def _peers(shape: Shape, rank: int) -> list[int]:
    return [other for other in range(shape.world_size) if shape.part_of(other) == shape.part_of(rank)]


@cache
def _copies(shape: Shape, rank: int) -> list[int]:
    return peers_of(rank, _peers(shape, rank), shape.copies, shape.world_size)


@dataclass(frozen=True)
class Habits:
    """Durations of a worker's actions, as (least, most) seconds.

    Attributes:
        steps: steps of the run.
        save_every: steps between checkpoints.
        import_s: start of the process.
        assemble_s: construction of model and optimizer.
        compute_s: forward and backward pass.
        update_s: optimizer step.
        save_s: writing a checkpoint.
        copy_s: copying a snapshot to host memory.
        send_s: sending a peer copy.
        leave_s: leaving a closed epoch.
        rebuild_s: rebuilding process groups.
        fetch_s: fetching a state.
    """

    steps: int = 16
    save_every: int = 8
    import_s: tuple[float, float] = (0.3, 3.0)
    assemble_s: tuple[float, float] = (0.1, 1.0)
    compute_s: tuple[float, float] = (0.1, 0.4)
    update_s: tuple[float, float] = (0.01, 0.05)
    save_s: tuple[float, float] = (0.05, 0.5)
    copy_s: tuple[float, float] = (0.01, 0.1)
    send_s: tuple[float, float] = (0.01, 0.3)
    leave_s: tuple[float, float] = (0.001, 0.1)
    rebuild_s: tuple[float, float] = (0.02, 0.4)
    fetch_s: tuple[float, float] = (0.01, 0.3)

    @property
    def step_s(self) -> float:
        """Approximate duration of a step, which is that of the slowest worker."""
        return self.compute_s[1] + self.update_s[1]


def draw_shape(rng: random.Random, world_size: int | None = None) -> Shape:
    """Draw a run of ``world_size`` logical ranks (None: random), on one node or several."""
    world = rng.choice([2, 4, 4, 4, 8]) if world_size is None else world_size
    dp = rng.choice([d for d in (1, 2, 2, 4) if world % d == 0])
    count = rng.choice([n for n in (1, 2, 2, 4) if world % n == 0 and n <= world])
    nodes = [(world // count, rng.choice([0, 1, 1, 2])) for _ in range(count)]
    nodes += [(0, world // count) for _ in range(rng.choice([0, 0, 0, 1, 2]))]
    shape = Shape(
        world,
        dp,
        rng.random() < 0.5,
        rng.choice([1, 1, 2]),
        tuple(nodes),
        rng.choice([0, 1, 3, 3, 9]),
        rng.random() < 0.97,
    )
    if world // dp >= 3:
        shape = replace(shape, checkfree=random.Random(repr(shape)).choice(["", MIDDLE, PLUS]))
    shape.groups["world"] = list(range(world))
    for rank in range(world):
        shape.groups.setdefault(f"dp{shape.part_of(rank)}", shape.dp_peers(rank))
    shape.groups["spare"] = list(range(0, world, 2))
    return shape
