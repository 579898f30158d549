"""Compute the answer of ``ft dmr estimate``: what executing each operator twice (DMR) will cost on a given cluster.

The module computes a profile (a trace of one training iteration) from analytic costs. The planner that also plans real
runs then decides when each operator is executed the second time.
"""

from dataclasses import dataclass

from ft.lab.estimate.calibrate import Shares, calibrated, shares
from ft.lab.estimate.clusters import Cluster
from ft.lab.estimate.layout import Layout
from ft.lab.estimate.profile import profile
from ft.lab.estimate.scenario import Question
from ft.systems.dmr.plan.planner import Options, plan
from ft.systems.dmr.plan.trace import Plan


@dataclass(frozen=True)
class Estimate:
    """The estimate for one batch size of a question.

    Attributes:
        layout: sizes of the parallel groups and of the batch.
        shares: overhead of naive DMR (each operator is repeated at once) and idle share of the iteration without its
            optimizer step, computed from the schedule.
        plan: the planner's result.
        flops_share: model FLOPs utilisation (MFU) without DMR, from 0 to 1; recomputation is not counted.
    """

    layout: Layout
    shares: Shares
    plan: Plan
    flops_share: float

    @property
    def seconds(self) -> float:
        """Return the seconds of an iteration without DMR."""
        return self.plan.predicted.t_none / 1e6


def cluster_of(asked: Question) -> Cluster:
    """Return the cluster of a question, calibrated if the question asks for that.

    Calibration slows all transfers down by one factor, so that the estimate shows a measured idle share or overhead.
    The factor is determined for the middle one of the batch sizes and used for all of them.
    """
    if asked.calibration is None:
        return asked.cluster
    by_size = sorted(asked.layouts, key=lambda layout: layout.batch)
    return calibrated(asked.model, by_size[len(by_size) // 2], asked.cluster, *asked.calibration)


def estimate(asked: Question, layout: Layout, cluster: Cluster) -> Estimate:
    """Estimate one of the question's layouts on its (calibrated) cluster.

    Raises:
        UserError: training without DMR does not fit the memory budget.
    """
    trace = profile(asked.model, layout, cluster, asked.budget)
    found = plan(trace, asked.budget, Options(kinds=asked.kinds))
    flops = asked.model.flops_per_token() * asked.model.sequence * layout.batch
    peak = layout.gpus * cluster.device.flops * found.predicted.t_none / 1e6
    return Estimate(layout, shares(asked.model, layout, cluster), found, flops / peak)
