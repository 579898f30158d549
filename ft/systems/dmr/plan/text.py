"""Format a DMR plan as text tables and as JSON values, for the commands ``ft dmr plan`` and ``ft dmr explain``.

DMR (dual modular redundancy, SpareTrain) verifies operators by executing them a second time. The tables show which
operators are verified in which way (sets), and how full the idle times of the stages (windows) and the memory are.
"""

from typing import Any

from ft.show.text import count, percent, seconds, table
from ft.systems.dmr.plan.assign import Plan, Predicted
from ft.systems.dmr.plan.sizes import gigabytes
from ft.systems.dmr.plan.summary import fillings, peak_by_stage, reasons, shares

_PHASES = (
    "all verified at once (naive)",
    "1: with the recomputation (P-DMR)",
    "2: AGC segments",
    "3: single operators",
)
_SETS = {
    "P": "P: with the recomputation",
    "D_inter": "D_inter: in windows between units",
    "D_intra": "D_intra: in windows inside units",
    "naive": "naive: at once",
    "unchecked": "unchecked: not reproducible",
}


def as_text(plan: Plan) -> str:
    """Return tables of planning phases, sets, windows and memory, and the reasons why some verification is not in
    windows and so lengthens the iteration."""
    parts = [_headline(plan), _phase_table(plan), _set_table(plan), _window_table(plan), _memory_table(plan)]
    parts.append("\n".join(reasons(plan)))
    return "\n\n".join(part for part in parts if part)


def _headline(plan: Plan) -> str:
    found, trace = plan.predicted, plan.trace
    model = " ".join(f"{name} {trace.fingerprint[name]}" for name in ("model", "tp", "pp", "dp", "ep"))
    sizes = ((trace.ops, "operator"), (trace.windows, "window"), (trace.stages, "stage"))
    lines = [
        f"{model}: {', '.join(count(len(each), word) for each, word in sizes)}",
        f"an iteration takes {_time(found.t_none)}, with this plan {_time(found.t_plan)} (+{percent(found.overhead)}), "
        f"with naive DMR {_time(found.t_naive)} (+{percent(found.naive_overhead)})",
        f"throughput won over naive DMR: {percent(found.gain)}",
    ]
    if trace.dynamic:
        lines.append("windows of changing length: phase 3 is decided at run time, and may reach what is said here")
    return "\n".join(lines)


def _time(us: float) -> str:
    return seconds(us / 1e6) if us >= 1e4 else f"{us:.0f} us"


def _phase_table(plan: Plan) -> str:
    rows = [
        (name, _time(each.t_plan), f"+{percent(each.overhead)}", percent(each.gain), _time(each.exposed_us))
        for name, each in zip(_PHASES, plan.phases, strict=False)
    ]
    return (
        table(("phases up to", "iteration", "over none", "gain on naive", "not hidden"), rows, range(1, 5))
        if rows
        else ""
    )


def _set_table(plan: Plan) -> str:
    rows = [(_SETS[each.set], str(each.operators), _time(each.t_us), _time(each.exposed_us)) for each in shares(plan)]
    return table(("verified", "operators", "their time", "not hidden"), rows, range(1, 4))


def _window_table(plan: Plan) -> str:
    rows = [
        (each.kind, str(each.windows), _time(each.dur_us), percent(each.used_us / each.dur_us if each.dur_us else 0.0))
        for each in fillings(plan)
    ]
    return table(("windows", "number", "together", "used"), rows, range(1, 4)) if rows else ""


def _memory_table(plan: Plan) -> str:
    budget = plan.trace.memory.budget or 0.0
    rows = [
        (str(stage), gigabytes(alone), gigabytes(kept), gigabytes(max(0.0, budget - kept)))
        for stage, (alone, kept) in peak_by_stage(plan).items()
    ]
    return table(("stage", "peak memory", "with DMR", f"left of {gigabytes(budget)}"), rows, range(4))


def as_values(plan: Plan) -> dict[str, Any]:
    """Return the plan as JSON values, with times in microseconds and sizes in bytes."""
    return {
        "predicted": _predicted_values(plan.predicted),
        "phases": [_predicted_values(each) for each in plan.phases],
        "sets": {each.set: {**vars(each)} for each in shares(plan)},
        "windows": {each.kind: {**vars(each)} for each in fillings(plan)},
        "agc_segments": len(plan.segments),
        "memory": {
            "budget": plan.trace.memory.budget,
            "stages": {
                stage: {"alone": alone, "planned": kept} for stage, (alone, kept) in peak_by_stage(plan).items()
            },
        },
        "online": plan.trace.dynamic,
        "reasons": list(reasons(plan)),
    }


def _predicted_values(found: Predicted) -> dict[str, float]:
    rates = {"overhead": found.overhead, "naive_overhead": found.naive_overhead, "gain": found.gain}
    return {**vars(found), **rates}
