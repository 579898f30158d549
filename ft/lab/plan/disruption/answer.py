"""The three ways to go on after a failure, side by side."""

from dataclasses import dataclass, replace

from ft.lab.interval import daly, in_steps, young
from ft.lab.plan.disruption.flags import Plan
from ft.lab.plan.disruption.model import DAY_S, Cost, of_hot_swap, of_restart, standbys_for

RARE = 1e-3
"""How seldom a standby may be missing with the number that is recommended."""


@dataclass(frozen=True)
class Way:
    """One way to go on, and what it costs.

    Attributes:
        name: for people. key: for programs. interval: steps between its checkpoints, 0 for none. cost: per failure.
        mttf_s: as in the plan. gpus: that train. standby_gpus: that are paid for and do not.
    """

    name: str
    key: str
    interval: int
    cost: Cost
    mttf_s: float
    gpus: int
    standby_gpus: int = 0

    @property
    def efficiency(self) -> float:
        return self.cost.efficiency(self.mttf_s)

    @property
    def useful(self) -> float:
        """Share of all GPU hours paid for, standbys and all, that gets the run on."""
        return self.efficiency * self.gpus / (self.gpus + self.standby_gpus)

    @property
    def lost_gpu_hours(self) -> float:
        """GPU hours per day on the clock that are paid for and do not get the run on."""
        return (1 - self.useful) * (self.gpus + self.standby_gpus) * DAY_S / 3600


@dataclass(frozen=True)
class Answer:
    """The ways in the order of the table, and figures beside them.

    Attributes:
        young_s, daly_s: seconds between checkpoints that cost least, by both. no_standby: probability that a failure
            finds none. standbys: with which one is missing in at most ``RARE`` of all failures.
    """

    ways: list[Way]
    young_s: float
    daly_s: float
    no_standby: float
    standbys: int

    @property
    def given(self) -> Way:
        return self.ways[0]

    @property
    def hot_swap(self) -> Way:
        return self.ways[-1]

    @property
    def recovery_ratio(self) -> float | None:
        """Time to regain the progress that a failure found: hot-swap's over a restart's at the given interval.

        None where a restart takes none.
        """
        theirs = self.given.cost.recovery
        return self.hot_swap.cost.recovery / theirs if theirs else None


def answer(plan: Plan) -> Answer:
    """Works the plan out."""
    cluster, training = plan.cluster, plan.training
    best_s = young(training.checkpoint_s, cluster.mttf_s)
    best = replace(training, interval=in_steps(best_s, training.step_s))
    size = (cluster.mttf_s, cluster.gpus)
    swap = of_hot_swap(cluster, replace(training, interval=plan.fallback), plan.replay, plan.swap)
    ways = [
        Way("restart", "restart", training.interval, of_restart(cluster, training, plan.replay), *size),
        Way("restart, Young", "restart_young", best.interval, of_restart(cluster, best, plan.replay), *size),
        Way("hot-swap", "hot_swap", plan.fallback, swap, *size, cluster.standby_nodes * cluster.gpus_per_node),
    ]
    return Answer(
        ways=ways,
        young_s=best_s,
        daly_s=daly(training.checkpoint_s, cluster.mttf_s),
        no_standby=cluster.no_standby,
        standbys=standbys_for(RARE, cluster.in_repair),
    )
