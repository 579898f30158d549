"""Parameters of a run, drawn from its seed, and its time limits.

A quorum is the set of replicas that execute a step of FT-HSDP together. A ring is the all-reduce of gradients between
the replicas. A replica that is behind fetches the state of another one.
"""

import random
from dataclasses import dataclass, field, replace

from ft.job.quorum.limits import Limits
from ft.job.quorum.state import SPAN
from ft.job.replicas.deadlines import RingLimits

LIMITS = Limits(
    silent_s=1.5,
    contact_s=1.0,
    regress_s=3.0,
    member_s=3.0,
    aside_s=9.0,
    back_s=2.0,
    away_s=30.0,
    start_s=6.0,
    load_s=6.0,
    stall_s=12.0,
    minimum_s=120.0,
    ban_s=8.0,
    ban_most_s=20.0,
).check()
"""The limits of production, shortened as in ``tests.simulation.control.shape``, for the same reason."""
RING_LIMITS = RingLimits(unknown_s=4.0, aside_s=9.0)
"""Production's time limits of rings, shortened likewise."""

_EARLIER_RUN = (12, 3 * SPAN + 14)
"""(step, lineage) of the checkpoint of an earlier run that had four quorum servers."""


@dataclass(frozen=True)
class Shape:
    """Parameters of one run. Times are in virtual seconds.

    Attributes:
        replicas: number of replicas.
        ranks: number of ranks of each replica.
        minimum: minimum number of replicas in a quorum.
        step_s: duration of forward and backward pass.
        fetch_s: duration of fetching a state from another replica.
        let_finish_s: longest time that a committing rank first waits for ranks that are fetching its state.
        save_steps: number of steps between checkpoints, which the replicas write in turns; 0: never.
        save_s: duration of writing a checkpoint.
        hang_s: time until an agent (the supervisor of a replica) kills a rank that makes no progress.
        build_s: time to start the processes of a replica again after a failure.
        begins_at: (step, lineage) of the initial state; (0, 0) unless the run continues an earlier one.
        mends: probability that a replica replaces a lost worker in place (hot-swap), and goes on from its snapshots.
        estimates: probability that a part of the state is lost with all copies then, and is estimated (CheckFree).
        fetches: probability that it is lost and not estimated, so that the replica fetches another one's state.
    """

    replicas: int
    ranks: int
    minimum: int
    step_s: float
    fetch_s: float
    let_finish_s: float
    save_steps: int
    save_s: float
    hang_s: float
    build_s: float
    begins_at: tuple[int, int] = (0, 0)
    mends: float = 0.0
    estimates: float = 0.0
    fetches: float = field(default=0.0, repr=False)  # so that it changes no random choice that depends on the text


def draw_shape(rng: random.Random) -> Shape:
    """Draw the parameters of a run."""
    replicas = rng.choice((2, 3, 3, 4))
    step_s = rng.uniform(0.1, 0.4)
    fetch_s = step_s * rng.uniform(0.2, 1.5)
    shape = Shape(
        replicas=replicas,
        ranks=rng.choice((1, 2, 2, 3)),
        minimum=1 if rng.random() < 0.8 else 2,
        step_s=step_s,
        fetch_s=fetch_s,
        let_finish_s=2.0 * fetch_s + 0.5,
        save_steps=rng.choice((0, 0, 5, 9)),
        save_s=rng.uniform(0.1, 8.0),
        hang_s=rng.uniform(2.0, 5.0),
        build_s=rng.uniform(0.3, 1.5),
        begins_at=_EARLIER_RUN if rng.random() < 0.2 else (0, 0),
    )
    own = random.Random(f"mends {shape!r}")  # drawn apart: the rest of a history is the same with and without them
    shape = replace(shape, mends=own.choice((0.0, 0.0, 0.8)), estimates=own.choice((0.0, 0.3)))
    return replace(shape, fetches=own.choice((0.0, 0.3)))
