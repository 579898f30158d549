"""Estimates what it costs to execute each operator twice (DMR) on a given cluster, for ``ft dmr estimate``.

The profile (a trace of one training iteration) is computed from analytic costs. The planner that also plans real runs
then decides when each operator is executed the second time.

Calibration slows down all transfers until the cost model predicts a measured idle share or overhead of naive DMR, which
repeats each operator at once. With documented and assumed rates only, the model predicts that a GPU is idle for a third
of the time, because of tensor parallelism on NVSwitch and pipeline bubbles. SpareTrain measured 68 % and 77 % on such
machines and does not give the reasons. One factor on the time of every transfer stands for all these reasons. The
factor is the same within and between nodes, so the shares of the different kinds of windows in the idle time remain as
the rates imply.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, NamedTuple

from ft.base.errors import UserError
from ft.lab.estimate.layout import ATTENTION, LATENCY_S, LINK, MEMORY, NETWORK, PRODUCTS, RESERVED, Cluster, Layout
from ft.lab.estimate.models import Model
from ft.lab.estimate.profile import Pass, part_works, pipeline_of, profile
from ft.show.text import left_out, percent, seconds, table
from ft.systems.dmr.plan.planner import Options, plan
from ft.systems.dmr.plan.predict import simulate
from ft.systems.dmr.plan.text import gigabytes, reasons
from ft.systems.dmr.plan.trace import INTER, INTRA, SETS, Operator, Plan, Window
from ft.systems.schedule.kinds import Pipeline
from ft.systems.schedule.program import Unit

_LEAST_SLOWDOWN, _MOST_SLOWDOWN, _BISECTIONS = 0.01, 1000.0, 40
"""Range in which the slowdown is searched, and the number of halvings of its logarithm."""


@dataclass(frozen=True)
class Question:
    """A consistent scenario.

    Attributes:
        layouts: one layout for each batch size, otherwise equal.
        budget: bytes that each GPU may use.
        calibration: ("idle" or "naive_overhead", share), or None for transfers at the assumed rates.
        kinds: kinds of windows (idle times of the GPU) that the planner may use to execute operators again.
    """

    model: Model
    cluster: Cluster
    layouts: tuple[Layout, ...]
    budget: float
    calibration: tuple[str, float] | None = None
    kinds: tuple[str, ...] = INTER + INTRA


@dataclass(frozen=True)
class Shares:
    """What DMR adds, and how long stages are idle, as shares of the duration of one iteration.

    The iteration has no DMR, and its optimizer step is not counted.

    Attributes:
        naive_overhead: the time that naive DMR adds.
        idle: the time for which a stage computes nothing, as a mean over the stages.
    """

    naive_overhead: float
    idle: float


class _Unit(NamedTuple):
    """Microseconds of one part in one direction: of its operators, of its transfers, and of executing all operators
    again and comparing their results."""

    computed: float
    sent: float
    checked: float


def shares(model: Model, layout: Layout, cluster: Cluster) -> Shares:
    """Return the idle share and the naive overhead that the cost model predicts for a cluster."""
    return _shares(_units(model, layout, cluster), pipeline_of(model, layout, cluster), 1.0)


def calibrated(model: Model, layout: Layout, cluster: Cluster, target: str, share: float) -> Cluster:
    """Return the cluster with the slowdown of transfers at which ``target`` equals ``share``.

    Args:
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
    return [(_unit(work.passes[0]), _unit(work.passes[1])) for work in part_works(model, layout, cluster)]


def _unit(one: Pass) -> _Unit:
    sent = sum(step.dur_us for step in one.steps if isinstance(step, Window))
    return _Unit(one.us - sent, sent, sum(step.check_us for step in one.steps if isinstance(step, Operator)))


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
    """The estimate for one batch size of a question. ``shares`` are computed from the schedule; ``flops_share`` is the
    model FLOPs utilisation (MFU) without DMR, from 0 to 1, without recomputation."""

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


LEFT_OUT = left_out(
    "the host: launches, Python, and what this runtime spends for each operator", "noise", "failures and mismatches"
)
SAID = {
    "P": "compared with what activation checkpointing recomputes",
    "D_inter": "executed again between units of work: while messages travel, and in bubbles",
    "D_intra": "executed again inside units: while tensor- or expert-parallel ranks exchange",
    "naive": "executed again at once",
    "unchecked": "not reproducible bit for bit: not verified",
}


def as_text(asked: Question, cluster: Cluster, found: Sequence[Estimate]) -> str:
    """Return what is left out, tables of the estimates, the planner's reasons for its choices, and the assumptions."""
    why = "\n".join([f"batch {found[-1].layout.batch}:", *(f"  {reason}" for reason in reasons(found[-1].plan))])
    return "\n\n".join(
        [LEFT_OUT, _head(asked, found[0]), _overheads(found), _sets(found), why, assumed(asked, cluster)]
    )


def _head(asked: Question, first: Estimate) -> str:
    layout, cluster = first.layout, asked.cluster
    experts = f", EP {layout.ep}" if asked.model.experts else ""
    chunks = f" ({layout.chunks} chunks each)" if layout.chunks > 1 else ""
    used = f"{layout.gpus} of {cluster.gpus}" if layout.gpus < cluster.gpus else f"{cluster.gpus}"
    held = max(first.plan.trace.memory.peak(stage) for stage in range(layout.pp))
    return (
        f"{asked.model.name} ({asked.model.parameters / 1e9:.1f} billion parameters) on {used} "
        f"{cluster.device.name} GPUs: TP {layout.tp} x PP {layout.pp}{chunks} x DP {layout.dp}{experts}, "
        f"microbatches of {layout.micro}\n"
        f"memory: {gigabytes(asked.budget)} budget, training alone takes {gigabytes(held)} on the fullest stage"
    )


def _overheads(found: Sequence[Estimate]) -> str:
    head = ("batch", "iteration", "idle", "of peak", "naive", "phase 1", "1+2", "1+2+3", "over naive", "memory")
    rows = [_row(one) for one in found]
    if len(found) > 1:
        means = [percent(fmean(one.plan.phases[phase].overhead for one in found)) for phase in range(4)]
        gain = percent(fmean(one.plan.predicted.gain for one in found))
        rows.append(["mean", "", "", "", *means, "+" + gain, ""])
    return table(head, rows, right=range(len(head)))


def _row(one: Estimate) -> list[str]:
    return [
        *(str(one.layout.batch), seconds(one.seconds), percent(one.shares.idle), percent(one.flops_share)),
        *(percent(phase.overhead) for phase in one.plan.phases),
        "+" + percent(one.plan.predicted.gain),
        gigabytes(one.plan.predicted.peak_bytes),
    ]


def _sets(found: Sequence[Estimate]) -> str:
    covered = [by_set(one) for one in found]
    rows = [
        [name, percent(fmean(each[name] for each in covered)), SAID[name]]
        for name in SETS
        if any(each[name] for each in covered)
    ]
    return table(("set", "of the time", "how it is verified"), rows, right=(1,))


def by_set(one: Estimate) -> dict[str, float]:
    """Return set -> share of its operators in the total time of all operators."""
    times: Counter[str] = Counter(dict.fromkeys(SETS, 0.0))
    for op in one.plan.trace.ops:
        times[one.plan.assign[op.id].set] += op.t_us
    total = sum(times.values())
    return {name: times[name] / total for name in SETS}


def assumed(asked: Question, cluster: Cluster) -> str:
    """Return text that says which figures are documented, assumed and calibrated."""
    device = cluster.device
    lines = [
        f"documented: {asked.model.source}; {device.source}",
        f"assumed: {percent(PRODUCTS)} of the peak in matrix products, {percent(ATTENTION)} in "
        f"attention, {percent(MEMORY)} of the memory's rate,",
        f"  {percent(LINK)} of NVLink's {device.link / 1e9:.0f} GB/s, {percent(NETWORK)} of the "
        f"network's {cluster.network / 1e9:.0f} GB/s, {LATENCY_S * 1e6:.0f} us latency,",
        f"  {gigabytes(RESERVED)} of each GPU's memory for context and buffers; transfers overlap no work,",
        "  data-parallel ones do entirely",
    ]
    if asked.model.experts:
        lines.append("  tokens spread evenly over experts")
    if asked.calibration is not None:
        target, share = asked.calibration
        name = "idle share" if target == "idle" else "naive overhead"
        lines.append(
            f"calibrated: every transfer takes {cluster.slowdown:.2f} times that, so that the {name} is {share:g}"
        )
    return "\n".join(lines)


def as_values(asked: Question, cluster: Cluster, found: Sequence[Estimate]) -> dict[str, Any]:
    """Return the estimates as JSON values, in seconds, bytes and shares."""
    return {
        "model": asked.model.name,
        "parameters": asked.model.parameters,
        "device": cluster.device.name,
        "gpus": found[0].layout.gpus,
        "tp": found[0].layout.tp,
        "pp": found[0].layout.pp,
        "dp": found[0].layout.dp,
        "ep": found[0].layout.ep,
        "memory_budget": asked.budget,
        "slowdown": cluster.slowdown,
        "overhead": fmean(one.plan.predicted.overhead for one in found),
        "gain": fmean(one.plan.predicted.gain for one in found),
        "batches": [_values(one) for one in found],
        "assumed": assumed(asked, cluster).splitlines(),
    }


def _values(one: Estimate) -> dict[str, Any]:
    return {
        "batch": one.layout.batch,
        "iteration_s": one.seconds,
        "idle": one.shares.idle,
        "of_peak_flops": one.flops_share,
        "training_bytes": max(one.plan.trace.memory.peak(stage) for stage in range(one.layout.pp)),
        "peak_bytes": one.plan.predicted.peak_bytes,
        "overhead_by_phase": [phase.overhead for phase in one.plan.phases],
        "gain_by_phase": [phase.gain for phase in one.plan.phases],
        "sets": by_set(one),
    }
