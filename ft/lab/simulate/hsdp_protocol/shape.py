"""Parameters of a run of ``ft simulate hsdp-protocol``, drawn from its seed, and switches for the model replicas.

A quorum is the set of replicas that execute a step of FT-HSDP together. A ring is the all-reduce of gradients between
the replicas. A replica that is behind fetches the state of another one.
"""

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
"""The limits of production, shortened as in ``ft.lab.simulate.control.shape``, for the same reason."""


@dataclass(frozen=True)
class Shape:
    """Parameters of one run. Times are in virtual seconds.

    Attributes:
        replicas: number of replicas.
        ranks: number of ranks of each replica.
        minimum: minimum number of replicas in a quorum.
        step_s: duration of forward and backward pass.
        fetch_s: duration of fetching a state from another replica.
        let_finish_s: longest time that a committing rank waits for ranks that are fetching its state.
        aside: True: a state is fetched into separate memory; False: it overwrites the old state, which is lost.
        save_steps: number of steps between checkpoints, which the replicas write in turns; 0: never.
        save_s: duration of writing a checkpoint.
        hang_s: time until an agent (the supervisor of a replica) kills a rank that makes no progress.
        build_s: time to start the processes of a replica again after a failure.
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
        """Return the time limit of a ring without progress, in virtual seconds: three steps plus one second."""
        return 3 * self.step_s + 1.0


@dataclass
class Habits:
    """The rules of the protocol that the model replicas follow. A rule that is False is an injected bug of the trainer.

    Attributes:
        votes: a rank commits a step only if all ranks of its replica have voted for it.
        votes_on_fetch: a rank adopts a fetched state only if all ranks have fetched theirs; otherwise each rank adopts
            the state that it has fetched.
        waits_for_fetch: a rank that is behind votes only when it has fetched the state that precedes the step.
        owns_up: a rank that fetches over its own state claims no state meanwhile.
        withdraws: a rank does not serve a state to other ranks once an optimizer step has changed it.
        lets_finish: a committing rank waits briefly for ranks that are reading its state.
        follows_positions: the training state determines the next samples, not a counter of the rank.
        advances_healthy_only: the data stream positions of replicas that are behind do not advance.
        zeros: replicas that are behind contribute zeros to the gradient.
        asks_again: a failed step is repeated in a new quorum.
        gives_up: a ring has a deadline.
        names_its_commits: the lineage of a state is set to the quorum that committed its last step.
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
    """Draw the parameters of a run."""
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
