"""Format the answer of ``ft plan disruption`` as text or JSON values.

The command compares ways to continue after a failure: restarts from a checkpoint, and hot-swap, in which a standby (a
warm, idle node) takes over.
"""

from typing import Any

from ft.lab.plan.disruption.answer import RARE, Answer, Way
from ft.lab.plan.disruption.flags import Plan
from ft.lab.plan.disruption.model import DAY_S
from ft.show.text import count, left_out, percent, seconds, table

LEFT_OUT = left_out(
    "the wait for a repair where no standby is left", "failures during restarts, recoveries, replays and saves"
)


def as_text(plan: Plan, found: Answer) -> str:
    """Return what is left out, the planned run, a table of the ways to continue after a failure, and conclusions."""
    head = ["", *(way.name for way in found.ways)]
    rows = [[f"checkpoint every ({_unit(plan)})", *(_interval(way, plan) for way in found.ways)]]
    rows += [["per failure:"] + [""] * len(found.ways)]
    rows += [["  overhead before it", *(seconds(way.cost.overhead) for way in found.ways)]]
    for part in _latencies(found):
        rows.append([f"  {part}", *(_part(way, part) for way in found.ways)])
    rows.append(["  replay", *(seconds(way.cost.replay) for way in found.ways)])
    rows.append(["  in all", *(seconds(way.cost.total) for way in found.ways)])
    mttf = plan.cluster.mttf_s
    rows.append(["lost per day of progress", *(seconds(way.cost.per_day(mttf)) for way in found.ways)])
    rows.append(["effective training time", *(percent(way.efficiency) for way in found.ways)])
    rows.append(["useful part of GPU hours", *(percent(way.useful) for way in found.ways)])
    rows.append(["GPU hours lost per day", *(f"{way.lost_gpu_hours:,.1f}" for way in found.ways)])
    if plan.price is not None:
        rows.append(["money lost per day", *(f"${way.lost_gpu_hours * plan.price:,.0f}" for way in found.ways)])
    if plan.steps is not None:
        rows.append([f"the run of {plan.steps:,} steps lasts", *(_days(way, plan) for way in found.ways)])
    columns = range(1, len(head))
    return "\n".join(
        [LEFT_OUT, "", *_question(plan, found), "", table(head, rows, right=columns), "", *_conclusions(plan, found)]
    )


def as_values(plan: Plan, found: Answer) -> dict[str, Any]:
    """Return the answer as JSON values, with times in seconds."""
    mttf = plan.cluster.mttf_s
    return {
        "mttf_s": mttf,
        "failures_per_day": DAY_S / mttf,
        "replay_model": type(plan.replay).__name__.lower(),
        "step_s": plan.training.step_s,
        "young_s": found.young_s,
        "daly_s": found.daly_s,
        "no_standby_probability": found.no_standby,
        "standbys_needed": found.standbys,
        "recovery_ratio": found.recovery_ratio,
        "ways": {way.key: _values(way, plan) for way in found.ways},
    }


def _values(way: Way, plan: Plan) -> dict[str, Any]:
    values = {
        "checkpoint_interval": way.interval or None,
        "per_failure_s": {
            "overhead": way.cost.overhead,
            **way.cost.latency,
            "replay": way.cost.replay,
            "total": way.cost.total,
        },
        "recovery_s": way.cost.recovery,
        "lost_per_day_s": way.cost.per_day(plan.cluster.mttf_s),
        "effective_training_time": way.efficiency,
        "useful_gpu_hours": way.useful,
        "lost_gpu_hours_per_day": way.lost_gpu_hours,
    }
    if plan.price is not None:
        values["lost_money_per_day"] = way.lost_gpu_hours * plan.price
    if plan.steps is not None:
        values["run_s"] = plan.steps * plan.training.step_s / way.efficiency
    return values


def _question(plan: Plan, found: Answer) -> list[str]:
    cluster, run = plan.cluster, plan.measured
    standbys = count(cluster.standby_nodes, "standby node")
    lines = [
        f"cluster   {cluster.gpus:,} GPUs on {cluster.nodes:,} nodes, {standbys}; "
        f"a failure every {seconds(cluster.mttf_s)} ({DAY_S / cluster.mttf_s:.3g} a day)",
        f"replay    {plan.replay.describe()}; of the interrupted step {plan.training.interrupted:g} is lost",
    ]
    if run is not None:
        lines.append(f"measured  {count(run.hot_swaps, 'hot-swap')} in the run, mean; steps of {seconds(run.step_s)}")
    return lines


def _conclusions(plan: Plan, found: Answer) -> list[str]:
    theirs, ours = found.given.cost.recovery, found.hot_swap.cost.recovery
    ratio = found.recovery_ratio
    times = f", {1 / ratio:.1f} times less" if ratio is not None and 0 < ratio < 1 else ""
    lines = [
        f"After a failure hot-swap regains its progress in {seconds(ours)}, a restart in {seconds(theirs)}: "
        f"{percent(ratio)}{times}."
    ]
    step = plan.training.step_s
    lines.append(
        f"Cheapest interval if failures are equally probable at any time: {found.young_s / step:,.1f} steps (Young), "
        f"{found.daly_s / step:,.1f} (Daly)."
    )
    if plan.cluster.standby_nodes:
        lines.append("GPU hours include the hours of standbys, which count as lost for hot-swap only.")
    if plan.cluster.repair_s:
        lines.append(
            f"A failure finds no standby with probability {found.no_standby:.2g}, and the run restarts then; "
            f"{count(found.standbys, 'standby node')} would bring that below {RARE:g}."
        )
    return lines


def _latencies(found: Answer) -> list[str]:
    parts = [part for way in reversed(found.ways) for part in way.cost.latency]
    return list(dict.fromkeys(parts))


def _part(way: Way, part: str) -> str:
    return seconds(way.cost.latency[part]) if part in way.cost.latency else ""


def _unit(plan: Plan) -> str:
    return f"steps of {seconds(plan.training.step_s)}"


def _interval(way: Way, plan: Plan) -> str:
    return f"{way.interval:,}" if way.interval else "none"


def _days(way: Way, plan: Plan) -> str:
    return f"{plan.steps * plan.training.step_s / way.efficiency / DAY_S:,.2f} days"
