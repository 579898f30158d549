"""Summarise a DMR plan in numbers, and format it as text tables and as JSON values, for ``ft dmr plan`` and ``ft dmr
explain``.

Second executions that are deferred to windows are hidden: they do not lengthen the iteration.
"""

from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

from msgspec.structs import asdict

from ft.show.text import count, percent, seconds, table
from ft.systems.dmr.plan.check import loads, peaks
from ft.systems.dmr.plan.predict import exposed_us
from ft.systems.dmr.plan.trace import INTER, INTRA, NAIVE, SETS, UNCHECKED, Plan, Predicted

_FAR = 0.05
"""Share of an iteration by which the simulated schedule may differ from the trace without being reported."""


class SetShare(NamedTuple):
    """The operators of one set: their number, their total duration without verification, and the verification time that
    is not hidden (microseconds)."""

    set: str
    operators: int
    t_us: float
    exposed_us: float


class WindowFilling(NamedTuple):
    """The windows of one kind: their number, their total duration, and the verification time in them (microseconds)."""

    kind: str
    windows: int
    dur_us: float
    used_us: float


def shares(plan: Plan) -> list[SetShare]:
    """Return a ``SetShare`` for every set that has operators, in the order of SETS."""
    found: dict[str, list[float]] = defaultdict(lambda: [0, 0.0, 0.0])
    for op in plan.trace.ops:
        how = plan.assign[op.id]
        sums = found[how.set]
        sums[0] += 1
        sums[1] += op.t_us
        sums[2] += exposed_us(plan.trace, op, how)
    return [SetShare(name, int(found[name][0]), *found[name][1:]) for name in SETS if name in found]


def fillings(plan: Plan) -> list[WindowFilling]:
    """Return a ``WindowFilling`` for every kind of window that occurs in the plan."""
    used = loads(plan)
    found = []
    for kind in INTER + INTRA:
        windows = [window for window in plan.trace.windows if window.kind == kind]
        if windows:
            hidden = sum(used.get(window.id, 0.0) for window in windows)
            found.append(WindowFilling(kind, len(windows), sum(window.dur_us for window in windows), hidden))
    return found


def peak_by_stage(plan: Plan) -> dict[int, tuple[float, float]]:
    """Return stage -> (peak memory of training without DMR, peak memory with the plan), in bytes."""
    with_plan = peaks(plan)
    alone = {stage: plan.trace.memory.peak(stage) for stage in plan.trace.stages}
    return {stage: (alone[stage], with_plan.get(stage, alone[stage])) for stage in plan.trace.stages}


def reasons(plan: Plan) -> Iterator[str]:
    """Yield the reasons why some verification is not hidden or some operators are not verified, one sentence each."""
    at_once = [op for op in plan.trace.ops if plan.assign[op.id].set == NAIVE]
    forced = [op for op in at_once if op.is_verified_at_once]
    if forced:
        yield f"{len(forced)} operators change their inputs, the optimizer's included: verified at once"
    left = [op for op in at_once if not op.is_verified_at_once]
    free = {each.kind: each.dur_us - each.used_us for each in fillings(plan)}
    if left:
        total = sum(op.check_us for op in left)
        yield f"{len(left)} operators ({total:.0f} us) found no window with time and memory: verified at once"
        room = ", ".join(f"{kind} {us:.0f} us" for kind, us in free.items()) or "none: there is no idle time"
        yield f"idle time left: {room} (before anything is executed, too short, or beyond the memory budget)"
    took = max((each.end_us for each in (*plan.trace.ops, *plan.trace.windows)), default=0.0)
    if plan.trace.pipeline is not None and abs(took - plan.predicted.t_none) > _FAR * took:
        said = f"the simulated schedule takes {plan.predicted.t_none:.0f} us, and in the trace it took {took:.0f} us"
        yield f"{said}: it has idle times that are no windows of it"
    lost = [op for op in plan.trace.ops if plan.assign[op.id].set == UNCHECKED]
    if lost:
        names = ", ".join(sorted({op.name for op in lost})[:5])
        yield f"NOT verified: {len(lost)} operators that are not reproducible ({names}); see --deterministic-mode"


def gigabytes(value: float) -> str:
    """Return a size in bytes as text with a decimal unit: "61.3 GB", "12.4 MB", "310 B"."""
    for unit, least in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= least:
            return f"{value / least:.1f} {unit}"
    return f"{value:.0f} B"


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
        "sets": {each.set: each._asdict() for each in shares(plan)},
        "windows": {each.kind: each._asdict() for each in fillings(plan)},
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
    return {**asdict(found), **rates}
