"""Format the result of ``ft dmr estimate`` as text or JSON values.

A set is a group of operators that DMR executes the second time in the same way: as part of activation checkpointing's
recomputation, in an idle time (window) between or inside units of work, or at once.
"""

from collections import Counter
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from ft.lab.estimate.answer import Estimate
from ft.lab.estimate.clusters import Cluster
from ft.lab.estimate.scenario import Question
from ft.show.text import left_out, percent, seconds, table
from ft.systems.dmr.plan.text import gigabytes, reasons
from ft.systems.dmr.plan.trace import SETS

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
    reached, device = cluster.reached, cluster.device
    lines = [
        f"documented: {asked.model.source}; {device.source}",
        f"assumed: {percent(reached.products)} of the peak in matrix products, {percent(reached.attention)} in "
        f"attention, {percent(reached.memory)} of the memory's rate,",
        f"  {percent(reached.link)} of NVLink's {device.link / 1e9:.0f} GB/s, {percent(reached.network)} of the "
        f"network's {cluster.network / 1e9:.0f} GB/s, {reached.latency_s * 1e6:.0f} us latency,",
        f"  {gigabytes(cluster.reserved)} of each GPU's memory for context and buffers; transfers overlap no work,",
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
