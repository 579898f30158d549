"""Compute the answer of ``ft dmr estimate``: what executing each operator twice (DMR) will cost on a given cluster.

The module computes a profile (a trace of one training iteration) from analytic costs. The planner that also plans real
runs then decides when each operator is executed the second time.

Calibration slows down all transfers until the cost model predicts a measured idle share or overhead of naive DMR, which
repeats each operator at once. With documented and assumed rates only, the model predicts that a GPU is idle for a third
of the time, because of tensor parallelism on NVSwitch and pipeline bubbles. SpareTrain measured 68 % and 77 % on such
machines and does not give the reasons. One factor on the time of every transfer stands for all these reasons. The
factor is the same within and between nodes, so the shares of the different kinds of windows in the idle time remain as
the rates imply.
"""

from dataclasses import dataclass, replace

from ft.base.errors import UserError
from ft.lab.estimate.block import Transfer
from ft.lab.estimate.clusters import Cluster
from ft.lab.estimate.layout import Layout
from ft.lab.estimate.models import Model
from ft.lab.estimate.profile import part_works, pipeline_of, profile
from ft.lab.estimate.scenario import Question
from ft.lab.estimate.stage import PartWork, PlacedStep
from ft.systems.dmr.plan.planner import Options, plan
from ft.systems.dmr.plan.predict import simulate
from ft.systems.dmr.plan.trace import Plan
from ft.systems.schedule.kinds import Pipeline
from ft.systems.schedule.program import Unit

_LEAST_SLOWDOWN, _MOST_SLOWDOWN, _BISECTIONS = 0.01, 1000.0, 40
"""Range in which the slowdown is searched, and the number of halvings of its logarithm."""


@dataclass(frozen=True)
class Shares:
    """Shares of one iteration without its optimizer step.

    Attributes:
        naive_overhead: time that naive DMR adds, as a share of the iteration's time without DMR.
        idle: share of the time in which a stage computes nothing (mean over stages).
    """

    naive_overhead: float
    idle: float


@dataclass(frozen=True)
class _Unit:
    """Times of one model part (a stage, or one of its chunks) for one microbatch in one direction, in microseconds.

    Attributes:
        computed: time of the operators.
        sent: time of the transfers.
        checked: time to execute all operators again and compare their results.
    """

    computed: float
    sent: float
    checked: float


def shares(model: Model, layout: Layout, cluster: Cluster) -> Shares:
    """Return the idle share and the naive overhead that the cost model predicts for a cluster."""
    return _shares(_units(model, layout, cluster), pipeline_of(model, layout, cluster), 1.0)


def calibrated(model: Model, layout: Layout, cluster: Cluster, target: str, share: float) -> Cluster:
    """Return the cluster with the slowdown of transfers at which ``target`` equals ``share``.

    Args:
        model: the model.
        layout: sizes of the parallel groups and of the batch.
        cluster: the cluster, whose own slowdown is ignored.
        target: "naive_overhead" or "idle".
        share: the measured share, more than 0 and less than 1.

    Raises:
        UserError: no slowdown gives this share.
    """
    cluster = replace(cluster, slowdown=1.0)
    units, pipeline = _units(model, layout, cluster), pipeline_of(model, layout, cluster)
    rising = target == "idle"  # slower transfers increase the idle share, and decrease the naive overhead

    def excess(slowdown: float) -> float:
        found = getattr(_shares(units, pipeline, slowdown), target) - share
        return found if rising else -found

    low, high = _LEAST_SLOWDOWN, _MOST_SLOWDOWN
    if not 0 < share < 1 or excess(low) > 0 or excess(high) < 0:
        reach = [getattr(_shares(units, pipeline, each), target) for each in (low, high)]
        raise UserError(
            f"{target} = {share:g} cannot be reached: transfers of any speed give {min(reach):.2f} to {max(reach):.2f}",
            "give a share between these values, or remove the calibration",
        )
    for _ in range(_BISECTIONS):
        middle = (low * high) ** 0.5
        low, high = (low, middle) if excess(middle) > 0 else (middle, high)
    return replace(cluster, slowdown=(low * high) ** 0.5)


def _units(model: Model, layout: Layout, cluster: Cluster) -> list[tuple[_Unit, _Unit]]:
    """Return the (forward, backward) times of each part of the model."""
    return [(_unit(work.forward), _unit(work.backward)) for work in part_works(model, layout, cluster)]


def _unit(steps: list[PlacedStep]) -> _Unit:
    sent = sum(one.t_us for one in steps if isinstance(one.step, Transfer))
    checked = sum(one.t_us + one.compare_us for one in steps if not isinstance(one.step, Transfer))
    return _Unit(PartWork.duration_us(steps) - sent, sent, checked)


def _shares(units: list[tuple[_Unit, _Unit]], pipeline: Pipeline, slowdown: float) -> Shares:
    def of(unit: Unit) -> _Unit:
        return units[unit.chunk * pipeline.stages + unit.stage][unit.backward]

    def plain(unit: Unit) -> float:
        one = of(unit)
        return one.computed + slowdown * one.sent

    pipeline = replace(pipeline, comm_us=pipeline.comm_us * slowdown)
    end = simulate(pipeline, plain).end_us
    naive = simulate(pipeline, lambda unit: plain(unit) + of(unit).checked).end_us
    busy = sum(forward.computed + backward.computed for forward, backward in units) * pipeline.microbatches
    return Shares(naive / end - 1, 1 - busy / end / pipeline.stages)


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
