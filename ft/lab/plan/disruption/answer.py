"""Compare three ways to continue after a failure: restart, restart with Young's checkpoint interval, and hot-swap.

A restart continues from the last checkpoint, at the given interval or at the interval that is optimal by Young's
formula. In a hot-swap a standby (a warm, idle node) takes over, with state from peers' memory.
"""

from dataclasses import dataclass, replace

from ft.lab.interval import daly, in_steps, young
from ft.lab.plan.disruption.flags import Plan
from ft.lab.plan.disruption.model import DAY_S, Cost, of_hot_swap, of_restart, standbys_for

RARE = 1e-3
"""Largest acceptable probability that no standby is available at a failure, for the recommended number of standbys."""


@dataclass(frozen=True)
class Way:
    """One way to continue after a failure, and its cost.

    Attributes:
        name: name in tables.
        key: name in JSON.
        interval: number of steps between checkpoints, 0 for none.
        cost: expected cost per failure.
        mttf_s: mean seconds of training progress between two failures.
        gpus: number of GPUs that train.
        standby_gpus: number of GPUs that are paid for as standbys.
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
        """Return the share of all GPU hours paid for, standbys included, that advances the training."""
        return self.efficiency * self.gpus / (self.gpus + self.standby_gpus)

    @property
    def lost_gpu_hours(self) -> float:
        """Return the GPU hours per day of wall time that are paid for and do not advance the training."""
        return (1 - self.useful) * (self.gpus + self.standby_gpus) * DAY_S / 3600


@dataclass(frozen=True)
class Answer:
    """The compared ways to continue, with related figures.

    Attributes:
        ways: the ways in the order of the table: first the restart at the given interval, last the hot-swap.
        young_s: optimal seconds between checkpoints by Young's formula.
        daly_s: optimal seconds between checkpoints by Daly's formula.
        no_standby: probability that no standby is available when a failure strikes.
        standbys: number of standby nodes with which this probability is at most ``RARE``.
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
        """Return the recovery time with hot-swap divided by that with a restart at the given checkpoint interval.

        The recovery time includes the time to compute lost steps again. The result is None if a restart takes no time.
        """
        theirs = self.given.cost.recovery
        return self.hot_swap.cost.recovery / theirs if theirs else None


def answer(plan: Plan) -> Answer:
    """Return the compared ways and related figures for the planned run."""
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
