"""Calibrate a cluster's cost model: slow down all transfers until it predicts a measured idle share or DMR overhead.

DMR executes each operator twice; naive DMR repeats each operator at once, and SpareTrain's DMR repeats operators in
windows, that is, times in which the GPU is idle. With documented and assumed rates only, the cost model predicts that a
GPU is idle for a third of the time, because of tensor parallelism on NVSwitch and pipeline bubbles. SpareTrain measured
68 % and 77 % on such machines and does not give the reasons. One factor on the time of every transfer stands for all
these reasons. The factor is the same within and between nodes, so the shares of the different kinds of windows in the
idle time remain as the rates imply.
"""

from dataclasses import dataclass, replace

from ft.base.errors import UserError
from ft.lab.estimate.block import Transfer
from ft.lab.estimate.clusters import Cluster
from ft.lab.estimate.layout import Layout
from ft.lab.estimate.models import Model
from ft.lab.estimate.profile import part_works, pipeline_of
from ft.lab.estimate.stage import PartWork, PlacedStep
from ft.systems.dmr.plan.predict import simulate
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
