"""What a simulated run looks like, drawn from its seed, and how its model replicas behave."""

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
"""Production's ladder with shorter rungs: virtual seconds cost real ones, and nothing depends on their length."""


@dataclass(frozen=True)
class Shape:
    """One run. All times in virtual seconds.

    Attributes:
        ranks: of a replica. minimum: replicas needed for a step. step_s: forward and backward. fetch_s: of a state.
        let_finish_s: how long a rank that commits waits for those who are fetching its state (``withdraw``).
        aside: a state is fetched into memory of its own; otherwise over the one that was there, which is lost by that.
        save_steps: so often a replica saves, each in its turn; 0: never. save_s: how long that takes it.
        hang_s: until an agent ends a rank that does nothing. build_s: of a replica's next life.
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
        """A ring without progress gives up: three steps and a second."""
        return 3 * self.step_s + 1.0


@dataclass
class Habits:
    """How the model replicas follow the protocol; each one False, planted, is a bug of the trainer's.

    Attributes:
        votes: a rank does only what all ranks of its replica have voted for. votes_on_fetch: so it is with fetched
            states too, or else each rank goes on with what it has got. waits_for_fetch: nobody votes without the
            state before the step. owns_up: who fetches over its own state claims none meanwhile. withdraws: nobody is
            served from a state that an optimizer step has changed. lets_finish: a rank waits a little for who is
            reading its state. follows_positions: what is trained next is what the state says.
        advances_healthy_only: the positions of those behind stay. zeros: those behind contribute nothing.
        asks_again: a step that failed is tried in a new quorum. gives_up: a ring has a deadline.
        names_its_commits: by the quorum that committed, in the lineage.
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
