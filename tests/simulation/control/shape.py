"""Parameters of a simulated run, drawn from its seed: layout, timeouts and durations.

A logical rank is a position in the parallel layout. A node has seats for workers with a logical rank, and standbys,
which are started workers without one. A peer copy is a copy of a rank's snapshot in another worker's host memory.
"""

import random
from dataclasses import dataclass, field, replace
from functools import cache

from ft.job.control.recovery import MIDDLE, PLUS
from ft.job.control.state import GridPosition
from ft.job.control.timeouts import Timeouts
from ft.state.placement.assign import ring_of

TIMEOUTS = Timeouts(
    agent_beat_s=0.5,
    silent_s=9.0,
    stall_s=4.0,
    start_s=12.0,
    collective_s=6.0,
    endless_s=20.0,
    drain_s=8.0,
    launch_s=5.0,
    abort_s=6.0,
    verdict_s=12.0,
    repair_s=10.0,
    assemble_s=14.0,
    ready_s=18.0,
    device_s=9.0,
    mute_s=30.0,
    leave_s=5.0,
    join_s=40.0,
).check()
"""Production's timeouts, shortened with their order kept: virtual seconds cost real time, and no checked property
depends on the length of a timeout.
"""


@dataclass(frozen=True)
class Shape:
    """The layout of a run: its logical ranks, nodes and peer copies.

    Attributes:
        world_size: number of logical ranks.
        dp: number of logical ranks that hold the same part of the model; 1: no data parallelism.
        near: True: ranks with the same part are consecutive, most often on one node; False: they are far apart.
        copies: number of peer copies of each logical rank's snapshot.
        nodes: (number of seats, number of standbys) of each node.
        devices: number of devices of each node, one for each worker with a logical rank; 0: workers need none.
        max_restarts: number of warm restarts (restarts of all workers from the last checkpoint) that are allowed.
        hot_swap: whether lost workers may be replaced by standbys.
        groups: process group -> its logical ranks.
        checkfree: which lost pipeline stages may be rebuilt from adjacent stages (CheckFree): "" (none), or ``MIDDLE``
            or ``PLUS`` of ``ft.job.control.recovery``. Each part of the model is then a pipeline stage.
        on_device: whether devices carry out the collectives of a step, so that only the age of unfinished operations
            shows that a worker waits.
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
    on_device: bool = field(default=False, repr=False)
    devices: int = 0

    def part_of(self, rank: int) -> int:
        """Return the number of the model part that the rank holds."""
        return rank // self.dp if self.near else rank % (self.world_size // self.dp)

    def place_of(self, rank: int) -> GridPosition:
        """Return the rank's position in the parallel layout; each model part is a pipeline stage."""
        return GridPosition(self.part_of(rank), 0, self.dp_peers(rank).index(rank), 0, 1, lends=True)

    def dp_peers(self, rank: int) -> list[int]:
        """Return the ranks that hold the same part of the model, ``rank`` included."""
        return _peers(self, rank)

    def copies_at(self, rank: int) -> list[int]:
        """Return the ranks whose workers hold the peer copies of the rank's snapshot."""
        return _copies(self, rank)

    def groups_of(self, rank: int) -> list[str]:
        return [name for name, ranks in self.groups.items() if rank in ranks]


@cache
def _peers(shape: Shape, rank: int) -> list[int]:
    return [other for other in range(shape.world_size) if shape.part_of(other) == shape.part_of(rank)]


@cache
def _copies(shape: Shape, rank: int) -> list[int]:
    return ring_of(rank, _peers(shape, rank), shape.copies, shape.world_size)


@dataclass(frozen=True)
class Habits:
    """Length of the run, and durations of a worker's actions, each as (least, most) virtual seconds.

    Attributes:
        steps: number of training steps of the run.
        save_every: number of steps between two checkpoints.
        import_s: duration of the process's start.
        assemble_s: duration of the construction of model and optimizer.
        compute_s: duration of a forward and backward pass.
        update_s: duration of an optimizer step.
        save_s: duration of writing a checkpoint.
        copy_s: duration of copying a snapshot to host memory.
        send_s: duration of sending a peer copy.
        leave_s: duration of leaving an epoch that was closed after a failure.
        rebuild_s: duration of rebuilding process groups.
        fetch_s: duration of fetching a snapshot from another worker.
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
        """Return the approximate duration of a training step of the slowest worker, in virtual seconds."""
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
    if shape.checkfree and random.Random(f"copies {shape!r}").random() < 0.25:
        shape = replace(shape, copies=0)
    shape = replace(shape, on_device=random.Random(f"device {shape!r}").random() < 0.5)
    # Drawn apart, so that the rest of the run is the same with and without devices. A node without a free device is
    # full: a standby on it can replace this node's workers only.
    per_node = world // count
    shape = replace(shape, devices=random.Random(f"{shape!r} devices").choice([0, 0, per_node, per_node, per_node + 1]))
    shape.groups["world"] = list(range(world))
    for rank in range(world):
        shape.groups.setdefault(f"dp{shape.part_of(rank)}", shape.dp_peers(rank))
    shape.groups["spare"] = list(range(0, world, 2))
    return shape
