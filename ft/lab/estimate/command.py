"""Implement ``ft dmr estimate``: what it costs to execute each operator twice (DMR) on a cluster that need not exist.

The profile, a trace of one training iteration, is computed from analytic costs. The planner of real runs decides when
each operator is executed the second time, and the answer is that of ``ft dmr plan``.

Calibration slows down all transfers until the cost model predicts a measured idle share or overhead of naive DMR, which
repeats each operator at once. With documented and assumed rates only, the model predicts that a GPU is idle for a third
of the time, because of tensor parallelism on NVSwitch and pipeline bubbles. SpareTrain measured 68 % and 77 % on such
machines and does not give the reasons. One factor on the time of every transfer stands for all these reasons. The
factor is the same within and between nodes, so the shares of the different kinds of windows in the idle time remain as
the rates imply.
"""

import argparse
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from ft.base.errors import UserError
from ft.base.quantities import between, gigabytes_per_second, size, whole
from ft.base.scenario import Key, Keys, one_of, yes_or_no
from ft.lab.estimate.cluster import DEVICES, GB, MODELS, STATES, GpuCluster, JobSizes, Model, assumptions, fitted
from ft.lab.estimate.profile import Pass, part_works, pipeline_of, profile
from ft.show.text import left_out, percent
from ft.systems.dmr.plan import text
from ft.systems.dmr.plan.file import write_trace
from ft.systems.dmr.plan.planner import PlannerOptions, plan
from ft.systems.dmr.plan.predict import simulate
from ft.systems.dmr.plan.trace import INTER, INTRA, Operator, Plan, Window
from ft.systems.schedule.kinds import Pipeline
from ft.systems.schedule.program import Unit

_LEAST_SLOWDOWN, _MOST_SLOWDOWN, _BISECTIONS = 0.01, 1000.0, 40
"""Range in which the slowdown is searched, and the number of halvings of its logarithm."""
_COUNT, _SHARE, _LAYOUT, _CLUSTER = whole(1), between(1e-6, 0.999), "layout", "cluster"
KEYS = Keys({
    "model": Key(one_of(tuple(MODELS)), "NAME", f"one of {', '.join(MODELS)}", group="model"),
    "sequence": Key(_COUNT, "N", "number of tokens of a sequence; default: that of the model", group="model"),
    "device": Key(one_of(tuple(DEVICES)), "NAME", f"one of {', '.join(DEVICES)}", "h200", group=_CLUSTER),
    "gpus": Key(_COUNT, "N", "number of GPUs in all; GPUs that do not suffice for a whole copy of the model stay "
                "unused", group=_CLUSTER),
    "per_node": Key(_COUNT, "N", "number of GPUs in a node", 8, group=_CLUSTER),
    "network": Key(gigabytes_per_second, "GB/S", "bandwidth between nodes for each GPU, one way; default: that of "
                   "NVIDIA's own systems", group=_CLUSTER),
    "memory": Key(size, "SIZE", "memory budget of each GPU, such as 80GB; default: the memory of the device",
                  group=_CLUSTER),
    "pp": Key(_COUNT, "N", "number of pipeline stages", 1, group=_LAYOUT),
    "chunks": Key(_COUNT, "N", "number of model chunks of each stage; more than 1: interleaved schedule", 1,
                  group=_LAYOUT),
    "tp": Key(_COUNT, "N", "tensor-parallel size, with sequence parallelism; default: the GPUs of a node",
              group=_LAYOUT),
    "ep": Key(_COUNT, "N", "expert-parallel size, within the tensor-parallel group; default: the tensor-parallel size",
              group=_LAYOUT),
    "dp": Key(_COUNT, "N", "data-parallel size; default: as large as the number of GPUs allows", group=_LAYOUT),
    "batch": Key(_COUNT, "N", "number of sequences of an iteration, over all data-parallel copies", 16, group=_LAYOUT),
    "micro": Key(_COUNT, "N", "number of sequences of a microbatch", 1, group=_LAYOUT),
    "recompute": Key(one_of(("full", "none")), "HOW", "activation recomputation: full (every layer is a segment) or "
                     "none", "full", group=_LAYOUT),
    "early_stop": Key(yes_or_no, "BOOL", "whether recomputation omits the last operator of a segment, as torch's own "
                      "checkpointing does and Megatron's does not", False, group=_LAYOUT),
    "fused_gate": Key(yes_or_no, "BOOL", "whether the gate and up matrices of an MLP are one matrix product, as in "
                      "Megatron", True, group=_LAYOUT),
    "state": Key(one_of(tuple(STATES)), "NAME", "bytes of training state per parameter: megatron (18, of which 12 are "
                 "sharded over the copies) or titan (16)", "megatron", group=_LAYOUT),
    "idle": Key(_SHARE, "SHARE", "slow all transfers down until stages are idle for this share of the time",
                group="calibration"),
    "naive_overhead": Key(_SHARE, "SHARE", "slow all transfers down until naive DMR has this overhead",
                          group="calibration"),
    "bubbles": Key(yes_or_no, "BOOL", "whether pipeline bubbles are used as windows, too", True, group="plan"),
}, ("model", "gpus"))  # fmt: skip


@dataclass(frozen=True)
class EstimateQuestion:
    """A consistent scenario.

    Attributes:
        budget: bytes that each GPU may use.
        calibration: ("idle" or "naive_overhead", share), or None for transfers at the assumed rates.
        kinds: kinds of windows (idle times of the GPU) that the planner may use to execute operators again.
    """

    model: Model
    cluster: GpuCluster
    layout: JobSizes
    budget: float
    calibration: tuple[str, float] | None = None
    kinds: tuple[str, ...] = INTER + INTRA


def question(given: argparse.Namespace) -> EstimateQuestion:
    """Return the question of a parsed command line and its file.

    Raises:
        UserError: a value is missing, or contradicts another one.
    """
    has, _, _, problems = KEYS.read(given)
    problems.refuse()
    model, device = MODELS[has["model"]], DEVICES[has["device"]]
    model = model if has["sequence"] is None else replace(model, sequence=has["sequence"])
    network = device.network if has["network"] is None else has["network"] * GB
    cluster = GpuCluster(device, has["gpus"], has["per_node"], network)
    others = {name: has[name] for name in ("micro", "recompute", "dp", "chunks", "batch", "early_stop", "fused_gate")}
    layout = fitted(model, cluster, has["pp"], has["tp"], has["ep"], state=STATES[has["state"]], **others)
    targets = [name for name in ("idle", "naive_overhead") if has[name] is not None]
    targets = [name for name in targets if getattr(given, name) is not None] or targets  # a flag goes before the file
    if len(targets) > 1:
        raise UserError("transfers cannot be calibrated to an idle share and a naive overhead at once", "give one")
    return EstimateQuestion(
        model,
        cluster,
        layout,
        device.memory if has["memory"] is None else has["memory"],
        (targets[0], has[targets[0]]) if targets else None,
        tuple(kind for kind in INTER + INTRA if has["bubbles"] or kind != "bubble"),
    )


@dataclass(frozen=True)
class TimeShares:
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


def shares(model: Model, layout: JobSizes, cluster: GpuCluster) -> TimeShares:
    """Return the idle share and the naive overhead that the cost model predicts for a cluster."""
    return _shares(_units(model, layout, cluster), pipeline_of(model, layout, cluster), 1.0)


def calibrated(model: Model, layout: JobSizes, cluster: GpuCluster, target: str, share: float) -> GpuCluster:
    """Return the cluster with its transfers slowed down by the factor at which the model predicts the measured share.

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


def _units(model: Model, layout: JobSizes, cluster: GpuCluster) -> list[tuple[_Unit, _Unit]]:
    """Return the (forward, backward) times of each part of the model."""
    return [(_unit(work.passes[0]), _unit(work.passes[1])) for work in part_works(model, layout, cluster)]


def _unit(one: Pass) -> _Unit:
    sent = sum(step.dur_us for step in one.steps if isinstance(step, Window))
    return _Unit(one.us - sent, sent, sum(step.check_us for step in one.steps if isinstance(step, Operator)))


def _shares(units: list[tuple[_Unit, _Unit]], pipeline: Pipeline, slowdown: float) -> TimeShares:
    def of(unit: Unit) -> _Unit:
        return units[unit.chunk * pipeline.stages + unit.stage][unit.backward]

    def plain(unit: Unit) -> float:
        one = of(unit)
        return one.computed + slowdown * one.sent

    pipeline = replace(pipeline, comm_us=pipeline.comm_us * slowdown)
    end = simulate(pipeline, plain).end_us
    naive = simulate(pipeline, lambda unit: plain(unit) + of(unit).checked).end_us
    busy = sum(forward.computed + backward.computed for forward, backward in units) * pipeline.microbatches
    return TimeShares(naive / end - 1, 1 - busy / end / pipeline.stages)


def cluster_of(asked: EstimateQuestion) -> GpuCluster:
    """Return the cluster of a question, with transfers slowed down as far as its calibration asks.

    Raises:
        UserError: no slowdown gives the share that is asked for.
    """
    if asked.calibration is None:
        return asked.cluster
    return calibrated(asked.model, asked.layout, asked.cluster, *asked.calibration)


def estimate(asked: EstimateQuestion, cluster: GpuCluster) -> Plan:
    """Return the plan of an iteration on a (calibrated) cluster.

    Raises:
        UserError: training without DMR does not fit the memory budget.
    """
    trace = profile(asked.model, asked.layout, cluster, asked.budget)
    return plan(trace, asked.budget, PlannerOptions(kinds=asked.kinds))


_DESCRIPTION = """\
Estimate what DMR will cost on a cluster that need not exist. The iteration is computed from published model shapes,
data sheets and assumed efficiencies, and planned by the planner of real runs (ft dmr plan). Overheads are shares of an
iteration without DMR. A scenario file (examples/dmr) has a key for each flag; flags override the file."""
LEFT_OUT = left_out(
    "the host: launches, Python, and what this runtime spends for each operator", "noise", "failures and mismatches"
)


def add_parser(subparsers, name: str = "estimate") -> None:
    """Add the subcommand: ``ft dmr estimate``, and under another name ``ft plan dmr``."""
    parser = subparsers.add_parser(
        name,
        help="estimate what DMR will cost a model on a cluster, without hardware",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    KEYS.add_flags(parser)
    parser.add_argument("--out", metavar="FILE", help="write the computed profile to this file, for ft dmr plan")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.set_defaults(main=run)


def run(given: argparse.Namespace) -> int:
    """Print the estimate.

    Raises:
        UserError: the scenario is inconsistent, or training without DMR does not fit the memory budget.
    """
    asked = question(given)
    cluster = cluster_of(asked)
    found = estimate(asked, cluster)
    if given.out:
        write_trace(Path(given.out), found.trace)
    print(json.dumps(as_values(asked, cluster, found)) if given.json else as_text(asked, cluster, found))
    return 0


def as_text(asked: EstimateQuestion, cluster: GpuCluster, found: Plan) -> str:
    """Return what is left out, the scenario, the answer of ``ft dmr plan``, and the assumptions."""
    return "\n\n".join([LEFT_OUT, _head(asked, cluster, found), text.as_text(found), _assumed(asked, cluster)])


def _head(asked: EstimateQuestion, cluster: GpuCluster, found: Plan) -> str:
    layout = asked.layout
    experts = f", EP {layout.ep}" if asked.model.experts else ""
    chunks = f" ({layout.chunks} chunks each)" if layout.chunks > 1 else ""
    used = f"{layout.gpus} of {cluster.gpus}" if layout.gpus < cluster.gpus else f"{cluster.gpus}"
    held = max(found.trace.memory.peak(stage) for stage in range(layout.pp))
    return (
        f"{asked.model.name} ({asked.model.parameters / 1e9:.1f} billion parameters) on {used} "
        f"{cluster.device.name} GPUs: TP {layout.tp} x PP {layout.pp}{chunks} x DP {layout.dp}{experts}, "
        f"a batch of {layout.batch} in microbatches of {layout.micro}\n"
        f"memory: {text.gigabytes(asked.budget)} budget, training alone takes {text.gigabytes(held)} on the fullest "
        f"stage\nwithout DMR stages are idle for {percent(shares(asked.model, layout, cluster).idle)} of the time, "
        f"and GPUs reach {percent(_of_peak(asked, found))} of their peak"
    )


def _of_peak(asked: EstimateQuestion, found: Plan) -> float:
    """Return the model FLOPs utilisation without DMR, from 0 to 1, without recomputation."""
    flops = asked.model.flops_per_token() * asked.model.sequence * asked.layout.batch
    return flops / (asked.layout.gpus * asked.cluster.device.flops * found.predicted.t_none / 1e6)


def _assumed(asked: EstimateQuestion, cluster: GpuCluster) -> str:
    """Return text that says which figures are documented, assumed and calibrated."""
    said = assumptions(asked.model, cluster)
    if asked.calibration is None:
        return said
    target, share = asked.calibration
    name = "idle share" if target == "idle" else "naive overhead"
    return (
        f"{said}\ncalibrated: every transfer takes {cluster.slowdown:.2f} times that, so that the {name} is {share:g}"
    )


def as_values(asked: EstimateQuestion, cluster: GpuCluster, found: Plan) -> dict[str, Any]:
    """Return the estimate as JSON values: those of ``ft dmr plan``, and the scenario."""
    layout = asked.layout
    return {
        "model": asked.model.name,
        "parameters": asked.model.parameters,
        "device": cluster.device.name,
        **{name: getattr(layout, name) for name in ("gpus", "tp", "pp", "dp", "ep", "batch")},
        "slowdown": cluster.slowdown,
        "idle": shares(asked.model, layout, cluster).idle,
        "of_peak_flops": _of_peak(asked, found),
        **text.as_values(found),
        "assumed": _assumed(asked, cluster).splitlines(),
    }
