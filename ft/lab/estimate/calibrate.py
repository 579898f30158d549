"""Transfers slowed down until the model shows what was measured.

By rate alone, tensor parallel on NVSwitch and the bubbles leave a GPU idle for a third of the time; SpareTrain measured
68 % and 77 % on such machines, for reasons it does not print. One factor on every transfer stands for all of them. It
is the same for windows in and between nodes, so that how the idle time divides into kinds stays what the rates say.
"""

from dataclasses import dataclass, replace

from ft.base.errors import UserError
from ft.lab.estimate.block import Transfer
from ft.lab.estimate.clusters import Cluster
from ft.lab.estimate.layout import Layout
from ft.lab.estimate.models import Model
from ft.lab.estimate.profile import part_works, pipeline_of
from ft.lab.estimate.stage import PartWork, Placed
from ft.systems.dmr.plan.schedule import Pipeline, Unit, simulate

FASTEST, SLOWEST, STEPS = 0.01, 1000.0, 40


@dataclass(frozen=True)
class Shares:
    """Of one iteration without its optimizer step: what naive DMR adds, and how long stages compute nothing (mean)."""

    naive_overhead: float
    idle: float


@dataclass(frozen=True)
class _Unit:
    """Of one part and direction, microseconds: operators, transfers, verification of all operators."""

    computed: float
    sent: float
    checked: float


def shares(model: Model, layout: Layout, cluster: Cluster) -> Shares:
    """What a cluster shows, by its schedule."""
    return _shares(_units(model, layout, cluster), pipeline_of(model, layout, cluster), 1.0)


def calibrated(model: Model, layout: Layout, cluster: Cluster, target: str, share: float) -> Cluster:
    """The cluster with the slowdown at which ``target`` comes out as ``share``.

    Args:
        target: "naive_overhead" or "idle".

    Raises:
        UserError: no slowdown does that.
    """
    cluster = replace(cluster, slowdown=1.0)
    units, pipeline = _units(model, layout, cluster), pipeline_of(model, layout, cluster)
    rising = target == "idle"

    def excess(slowdown: float) -> float:
        found = getattr(_shares(units, pipeline, slowdown), target) - share
        return found if rising else -found

    low, high = FASTEST, SLOWEST
    if not 0 < share < 1 or excess(low) > 0 or excess(high) < 0:
        reach = [getattr(_shares(units, pipeline, each), target) for each in (low, high)]
        raise UserError(
            f"{target} = {share:g} cannot be reached: transfers of any speed give {min(reach):.2f} to {max(reach):.2f}",
            "give a share between these, or leave calibration out",
        )
    for _ in range(STEPS):
        middle = (low * high) ** 0.5
        low, high = (low, middle) if excess(middle) > 0 else (middle, high)
    return replace(cluster, slowdown=(low * high) ** 0.5)


def _units(model: Model, layout: Layout, cluster: Cluster) -> list[tuple[_Unit, _Unit]]:
    """Of each part, its forward and its backward."""
    return [(_unit(work.forward), _unit(work.backward)) for work in part_works(model, layout, cluster)]


def _unit(steps: list[Placed]) -> _Unit:
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
