"""Draw a DMR plan as a picture: the work of each pipeline stage over time, and its memory against the budget.

The picture shows how much of this verification the plan puts into windows, the times in which a stage communicates or
is idle. Naive DMR verifies every operator immediately after its first execution.
"""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.patches import Patch

from ft.show import axes as plot
from ft.show import palette
from ft.show.text import percent
from ft.systems.dmr.plan.check import loads, memory_over_time
from ft.systems.dmr.plan.trace import BACKWARD, FORWARD, INTER, RECOMPUTE, Operator, Plan

_WORK = {FORWARD: "#8fb3d9", RECOMPUTE: "#c3d3e4", BACKWARD: "#4f7fb0"}
# Operators outside of all units: gradient reduction, optimizer step.
_OUTSIDE = "#7468b3"
# Windows that the plan fills with verification: between two units, inside a unit.
_FILLED_BETWEEN, _FILLED_INSIDE = "#3f8f55", "#b07d2a"
_LANE = 0.7
MOST_STAGES = 8
"""Maximum number of stages that are drawn, evenly spread; with more, the lanes would be too thin to read."""


def draw(plan: Plan, path: Path) -> None:
    """Write the picture of ``plan`` to ``path``.

    Raises:
        UserError: the file cannot be written.
    """
    stages = plan.trace.stages
    if len(stages) > MOST_STAGES:
        stages = [stages[round(i * (len(stages) - 1) / (MOST_STAGES - 1))] for i in range(MOST_STAGES)]
    found = plan.predicted
    planned, naive = percent(found.overhead), percent(found.naive_overhead)
    title = f"iteration time with this DMR plan: +{planned}, with naive DMR: +{naive}"
    figure, (lanes, memory) = plot.rows(title, (0.55 * len(stages) + 0.7, 2.6))
    _lanes(lanes, plan, stages)
    _memory(memory, plan, stages)
    memory.sharex(lanes)
    memory.set_xlabel("milliseconds of the iteration", **plot.STYLE)
    plot.save(figure, path)


def _lanes(axes, plan: Plan, stages: Sequence[int]) -> None:
    plot.plain(axes, "work of each stage, and verification in its windows", pad=22)
    used = loads(plan)
    for lane, stage in enumerate(stages):
        by_colour: dict[str, list[tuple[float, float]]] = {}
        for begin, end, phase in _work([op for op in plan.trace.ops if op.stage == stage]):
            by_colour.setdefault(_WORK.get(phase, _OUTSIDE), []).append((begin / 1e3, (end - begin) / 1e3))
        for window in plan.trace.windows:
            if window.stage == stage and window.dur_us:
                by_colour.setdefault(palette.FAINT, []).append((window.start_us / 1e3, window.dur_us / 1e3))
        for window in plan.trace.windows:
            if window.stage == stage and used.get(window.id):
                colour = _FILLED_BETWEEN if window.kind in INTER else _FILLED_INSIDE
                by_colour.setdefault(colour, []).append((window.start_us / 1e3, used[window.id] / 1e3))
        for colour, bars in by_colour.items():
            axes.broken_barh(bars, (lane - _LANE / 2, _LANE), facecolors=colour, linewidth=0)
    axes.set_yticks(range(len(stages)), [f"stage {stage}" for stage in stages])
    axes.invert_yaxis()
    named = [*((colour, phase) for phase, colour in _WORK.items()), (palette.FAINT, "idle")]
    named += [(_FILLED_BETWEEN, "verification between units"), (_FILLED_INSIDE, "verification inside units")]
    plot.legend(axes, [Patch(color=colour, label=label) for colour, label in named])


def _work(ops: Sequence[Operator]) -> list[tuple[float, float, str]]:
    """Merge operators of the same phase that follow one another without a gap; return (begin, end, phase) of each bar,
    in microseconds."""
    bars: list[tuple[float, float, str]] = []
    for op in sorted(ops, key=lambda op: op.start_us):
        if bars and bars[-1][2] == op.phase and op.start_us - bars[-1][1] < 1e-3:
            bars[-1] = (bars[-1][0], max(bars[-1][1], op.end_us), op.phase)
        else:
            bars.append((op.start_us, op.end_us, op.phase))
    return bars


def _memory(axes, plan: Plan, stages: Sequence[int]) -> None:
    plot.plain(axes, "memory in use: training alone (thin), and with tensors kept for later verification")
    colours = palette.LATER_WORKERS
    budget = plan.trace.memory.budget
    most = max(budget or 0.0, plan.predicted.peak_bytes)
    name, unit = ("GB", 1e9) if most >= 1e9 else ("MB", 1e6)
    planned = memory_over_time(plan)
    for i, stage in enumerate(stages):
        colour = colours[i % len(colours)]
        alone = plan.trace.memory.timeline.get(stage, ())
        if alone:
            _steps(axes, alone, unit, color=colour, linewidth=0.7, alpha=0.6)
        _steps(axes, planned.get(stage, ()), unit, color=colour, linewidth=1.5, label=f"stage {stage}")
    if budget is not None:
        axes.axhline(budget / unit, color=palette.FAULT, linewidth=1, linestyle="--", label="budget")
    axes.set_ylim(bottom=0)
    axes.set_ylabel(name, **plot.STYLE)
    axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5), labelcolor=palette.QUIET)


def _steps(axes, points: Sequence[tuple[float, float]], unit: float, **style) -> None:
    axes.step([at / 1e3 for at, _ in points], [live / unit for _, live in points], where="post", **style)
