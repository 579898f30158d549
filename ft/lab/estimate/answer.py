"""The estimate: a question's profile, planned by the planner that plans real runs."""

from dataclasses import dataclass

from ft.lab.estimate.calibrate import Shares, calibrated, shares
from ft.lab.estimate.clusters import Cluster
from ft.lab.estimate.layout import Layout
from ft.lab.estimate.profile import profile
from ft.lab.estimate.scenario import Question
from ft.systems.dmr.plan.assign import Plan
from ft.systems.dmr.plan.planner import Options, plan


@dataclass(frozen=True)
class Estimate:
    """One batch of a question.

    Args:
        shares: of the iteration by schedule, without its optimizer step.
        flops_share: of the devices' peak that the model's own FLOPs reach without DMR (recomputation not counted).
    """

    layout: Layout
    shares: Shares
    plan: Plan
    flops_share: float

    @property
    def seconds(self) -> float:
        """Of an iteration without DMR."""
        return self.plan.predicted.t_none / 1e6


def cluster_of(asked: Question) -> Cluster:
    """The cluster, calibrated where that is asked for, at the middle one of the batches; one factor serves all."""
    if asked.calibration is None:
        return asked.cluster
    by_size = sorted(asked.layouts, key=lambda layout: layout.batch)
    return calibrated(asked.model, by_size[len(by_size) // 2], asked.cluster, *asked.calibration)


def estimate(asked: Question, layout: Layout, cluster: Cluster) -> Estimate:
    """Of one of the question's layouts, on its (calibrated) cluster.

    Raises:
        UserError: training alone does not fit the budget.
    """
    trace = profile(asked.model, layout, cluster, asked.budget)
    found = plan(trace, asked.budget, Options(kinds=asked.kinds))
    flops = asked.model.flops_per_token() * asked.model.sequence * layout.batch
    peak = layout.gpus * cluster.device.flops * found.predicted.t_none / 1e6
    return Estimate(layout, shares(asked.model, layout, cluster), found, flops / peak)
