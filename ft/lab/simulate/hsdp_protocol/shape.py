"""Parameters of a simulated run, drawn from its seed, and switches for the behaviour of its model replicas."""

import random
from dataclasses import dataclass

from ft.job.quorum.limits import Limits

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
"""Production's timeouts, shortened in their order: virtual seconds cost real time, and no property depends on their
length.
"""


@dataclass(frozen=True)
class Shape:
    """Parameters of one run. Times are in virtual seconds.

    Attributes:
        replicas: number of replicas.
        ranks: ranks of a replica.
        minimum: replicas needed for a step.
        step_s: duration of forward and backward pass.
        fetch_s: duration of fetching a state.
        let_finish_s: how long a committing rank waits for ranks that are fetching its state (``withdraw``).
        aside: a state is fetched into separate memory; otherwise it overwrites the old state, which is lost.
        save_steps: steps between checkpoints, which the replicas write in turns; 0: never.
        save_s: duration of a checkpoint.
        hang_s: time until an agent kills a rank that makes no progress.
        build_s: time to build a replica's next life.
    """

    replicas: int
    ranks: int
    minimum: int
    step_s: float
    fetch_s: float
    let_finish_s: float
    aside: bool
    save_steps: int
    save_s: float
    hang_s: float
    build_s: float

    @property
    def ring_s(self) -> float:
        """Deadline of a ring without progress: three steps plus one second."""
        return 3 * self.step_s + 1.0


@dataclass
class Habits:
    """How the model replicas follow the protocol. Each one that is False is an injected bug of the trainer.

    Attributes:
        votes: a rank does only what all ranks of its replica have voted for.
        votes_on_fetch: the vote also covers fetched states; otherwise each rank adopts the state that it has fetched.
        waits_for_fetch: no rank votes before it has the state that precedes the step.
        owns_up: a rank that fetches over its own state claims no state meanwhile.
        withdraws: no state is served once an optimizer step has changed it.
        lets_finish: a committing rank waits briefly for ranks that are reading its state.
        follows_positions: the next samples are determined by the state.
        advances_healthy_only: stream positions of replicas that are behind do not advance.
        zeros: replicas that are behind contribute zeros.
        asks_again: a failed step is repeated in a new quorum.
        gives_up: a ring has a deadline.
        names_its_commits: the lineage names the quorum that committed the step.
    """

    votes: bool = True
    votes_on_fetch: bool = True
    waits_for_fetch: bool = True
    owns_up: bool = True
    withdraws: bool = True
    lets_finish: bool = True
    follows_positions: bool = True
    advances_healthy_only: bool = True
    zeros: bool = True
    asks_again: bool = True
    gives_up: bool = True
    names_its_commits: bool = True


def draw_shape(rng: random.Random) -> Shape:
    replicas = rng.choice((2, 3, 3, 4))
    step_s = rng.uniform(0.1, 0.4)
    fetch_s = step_s * rng.uniform(0.2, 1.5)
    return Shape(
        replicas=replicas,
        ranks=rng.choice((1, 2, 2, 3)),
        minimum=1 if rng.random() < 0.8 else 2,
        step_s=step_s,
        fetch_s=fetch_s,
        let_finish_s=2.0 * fetch_s + 0.5,
        aside=rng.random() < 0.5,
        save_steps=rng.choice((0, 0, 5, 9)),
        save_s=rng.uniform(0.1, 8.0),
        hang_s=rng.uniform(2.0, 5.0),
        build_s=rng.uniform(0.3, 1.5),
    )
