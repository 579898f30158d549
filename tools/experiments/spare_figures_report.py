"""Table and figure of the results of :mod:`spare_figures`."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter
from spare_tables import ROWS

from ft.lab.plan.spare.trials import Outcome
from ft.lab.simulate.spare import theory
from ft.lab.simulate.spare.scenario import Scenario
from ft.lab.simulate.spare.study import Estimate, Row
from ft.show import palette
from ft.show.text import percent, table

RESULTS = "tools/experiments/results/spare_figures"
TABLE_2 = {
    (200, "replication"): (3, 6.07, 0.6174),
    (200, "spare"): (9, 2.92, 0.8700),
    (600, "replication"): (3, 4.27, 0.7989),
    (600, "spare"): (9, 2.49, 0.9390),
    (1000, "replication"): (3, 3.88, 0.8441),
    (1000, "spare"): (9, 2.34, 0.9654),
}
"""(groups, scheme) -> redundancy, time-to-train over T_0, availability. SPARe's text has 8 for SPARe with N = 600."""

_NAME = {"spare": "SPARe", "replication": "replication", "checkpoint": "checkpoints"}
_COLOUR = {"spare": palette.LATER_WORKERS[0], "replication": palette.LATER_WORKERS[2]}
_PAPER = {"color": palette.FAULT, "zorder": 5}
_SIZE_IN, _DPI = (12.0, 15.0), 90


@dataclass(frozen=True)
class Case:
    """The simulation of one redundancy, with the formulas' values. ``trials``: Monte Carlo to the first wipe-out."""

    groups: int
    scheme: str
    redundancy: int
    found: dict[str, Estimate]
    progress: float
    ttt_theory: float | None
    availability_theory: float | None
    trials: Outcome | None

    @classmethod
    def of(cls, asked: Scenario, row: Row, trials: Outcome | None) -> "Case":
        groups, redundancy = asked.job.groups, row.redundancy
        if row.scheme != "spare":
            return cls(groups, row.scheme, redundancy, row.found, row.progress, None, None, None)
        job = asked.job
        interval = theory.restart_interval(groups, redundancy, asked.mtbf_s)
        share = theory.best_availability(job.save_s, interval, job.restart_s)
        norm = theory.time_to_train(groups, redundancy, asked.mtbf_s, job.save_s, job.restart_s)
        return cls(groups, row.scheme, redundancy, row.found, row.progress, norm, share, trials)


def write(cases: Sequence[Case], root: Path) -> str:
    """Write the results under ``root``; return the text."""
    text, path = as_text(cases), root / RESULTS
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".txt").write_text(text + "\n")
    picture(cases, path.with_suffix(".png"))
    return text


def as_text(cases: Sequence[Case]) -> str:
    """Return SPARe's Table 2 compared with the simulation, the gains, and every case."""
    by_case = {(case.groups, case.scheme, case.redundancy): case for case in cases}
    head = ("N", "scheme", "R", "paper", "here", "apart", "paper up", "here up", "best here")
    rows = []
    for (groups, scheme), (redundancy, norm, up) in TABLE_2.items():
        case = by_case.get((groups, scheme, redundancy))
        if case is not None:
            mean = case.found["ttt_norm"].mean
            best = best_of(cases, groups, scheme)
            at = f"{best.found['ttt_norm'].mean:.2f} at R = {best.redundancy}"
            both = [percent(up), percent(case.found["up_fraction"].mean)]
            apart = f"{100 * (mean / norm - 1):+.1f} %"
            rows.append([str(groups), _NAME[scheme], str(redundancy), f"{norm:.2f}", f"{mean:.2f}", apart, *both, at])
    lines = ["Table 2: normalised time-to-train and share of the time not in restarts and shrinking", ""]
    lines += [table(head, rows, right=(0, 2, 3, 4, 5, 6, 7)), ""]
    for groups in sorted({case.groups for case in cases}):
        ours, theirs = (best_of(cases, groups, scheme).found["ttt_norm"].mean for scheme in ("spare", "replication"))
        published = [TABLE_2[groups, scheme][1] for scheme in ("spare", "replication")]
        gains = percent(1 - ours / theirs), percent(1 - published[0] / published[1])
        lines.append(
            f"N = {groups}: the best SPARe takes {gains[0]} less than the best replication (paper: {gains[1]})"
        )
    lines += ["", "every case; +-: 95 % confidence of the mean", ""]
    head = (
        "N",
        "scheme",
        "R",
        "time to train",
        "theory (7)",
        "up",
        "available",
        "theory (2)",
        "restarts",
        "stacks/step",
    )
    return "\n".join([*lines, table(head, [_cells(case) for case in cases], right=(0, *range(2, 10)))])


def best_of(cases: Sequence[Case], groups: int, scheme: str) -> Case:
    """Return the case with the least time-to-train."""
    alike = [case for case in cases if (case.groups, case.scheme) == (groups, scheme)]
    return min(alike, key=lambda case: case.found["ttt_norm"].mean)


def _cells(case: Case) -> list[str]:
    found, norm = case.found, case.found["ttt_norm"]
    said = f"{norm.mean:.3f} +- {norm.half_width or 0:.3f}" if case.progress == 1 else f"{percent(case.progress)} done"
    formulas = [
        "-" if case.ttt_theory is None else f"{case.ttt_theory:.3f}",
        percent(found["up_fraction"].mean),
        percent(found["availability"].mean),
        percent(case.availability_theory),
    ]
    counts = [f"{found['restarts'].mean:.1f}", f"{found['stacks_per_step'].mean:.3f}"]
    return [str(case.groups), _NAME[case.scheme], str(case.redundancy), said, *formulas, *counts]


def picture(cases: Sequence[Case], path: Path) -> None:
    """Draw one column for each N, and one row for each of SPARe's figures 4 to 8."""
    columns = sorted({case.groups for case in cases})
    figure = Figure(figsize=_SIZE_IN, dpi=_DPI, facecolor=palette.PAPER, layout="constrained")
    FigureCanvasAgg(figure)
    title = "SPARe, figures 4 to 8: formulas, simulated here, and the paper's points"
    figure.suptitle(title, x=0.012, ha="left", fontsize=13, color=palette.INK, weight="bold")
    grid = figure.subplots(5, len(columns), squeeze=False)
    for column, groups in enumerate(columns):
        mine = [case for case in cases if case.groups == groups]
        for axes, draw in zip(grid[:, column], (_figure_4, _figure_5, _figure_6, _figure_7, _figure_8), strict=True):
            draw(axes, groups, mine)
            axes.set_title(f"{axes.get_title(loc='left')}, N = {groups}", loc="left", fontsize=9, color=palette.INK)
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            axes.tick_params(labelsize=8, colors=palette.QUIET)
            axes.spines[["top", "right"]].set_visible(False)
            axes.grid(color=palette.FAINT, linewidth=0.6)
            if column == 0:
                axes.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=_DPI, format="png")


def _figure_4(axes, groups: int, cases: Sequence[Case]) -> None:
    axes.set_title("4: failures up to a wipe-out", loc="left")
    _formula(axes, cases, lambda r: theory.mu(groups, r), "formula (3)")
    _trials(axes, cases, "failures_mean")
    printed = [(row.redundancy, row.failures_simulated) for row in ROWS if row.groups == groups]
    axes.plot(*zip(*printed, strict=True), "x", label="the paper's Monte Carlo", markersize=4, **_PAPER)


def _figure_5(axes, groups: int, cases: Sequence[Case]) -> None:
    axes.set_title("5: stacks (Monte Carlo: no patches)", loc="left")
    _formula(axes, cases, lambda r: theory.stack_mean(groups, r), "formula (5)")
    _formula(axes, cases, lambda r: theory.stack_lower_bound(groups, r), "formula (6)", linestyle="--")
    _formula(axes, cases, float, "replication", color=_COLOUR["replication"])
    _trials(axes, cases, "stack_mean")
    printed = [(row.redundancy, row.stack_simulated) for row in ROWS if row.groups == groups]
    axes.plot(*zip(*printed, strict=True), "x", label="the paper's Monte Carlo", markersize=4, **_PAPER)
    axes.set_ylim(0.9, 6)


def _figure_6(axes, groups: int, cases: Sequence[Case]) -> None:
    axes.set_title("6: normalised time-to-train", loc="left")
    _theory(axes, cases, "ttt_theory", "SPARe, formula (7)")
    _simulated(axes, cases, "ttt_norm")
    _table_2(axes, groups, 1)
    axes.set_ylim(2, 2.2 * TABLE_2[groups, "replication"][1])


def _figure_7(axes, groups: int, cases: Sequence[Case]) -> None:
    axes.set_title("7: availability (not in restarts and shrinking)", loc="left")
    _theory(axes, cases, "availability_theory", "SPARe, formula (2)")
    _simulated(axes, cases, "up_fraction")
    _table_2(axes, groups, 2)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))


def _figure_8(axes, groups: int, cases: Sequence[Case]) -> None:
    axes.set_title("8: stacks computed per step", loc="left")
    _formula(axes, cases, lambda r: theory.stack_mean(groups, r), "SPARe, formula (5)")
    _simulated(axes, cases, "stacks_per_step", ("spare",))
    axes.set_ylim(1.8, 3.4)
    axes.set_xlabel("redundancy", fontsize=9, color=palette.QUIET)


def _formula(axes, cases: Sequence[Case], of: Callable[[int], float], label: str, **style) -> None:
    places = [case.redundancy for case in cases if case.scheme == "spare"]
    axes.plot(places, [of(r) for r in places], label=label, **{"color": palette.QUIET, "linewidth": 1.2, **style})


def _trials(axes, cases: Sequence[Case], name: str) -> None:
    points = [(case.redundancy, getattr(case.trials, name)) for case in cases if case.trials is not None]
    style = {"color": _COLOUR["spare"], "markersize": 5, "fillstyle": "none"}
    axes.plot(*zip(*points, strict=True), "o", label="Monte Carlo here", **style)


def _theory(axes, cases: Sequence[Case], name: str, label: str) -> None:
    places = [(case.redundancy, getattr(case, name)) for case in cases if case.scheme == "spare"]
    axes.plot(*zip(*places, strict=True), color=palette.QUIET, linewidth=1.2, label=label)


def _simulated(axes, cases: Sequence[Case], name: str, schemes=("spare", "replication")) -> None:
    for scheme in schemes:
        mine = [case for case in cases if case.scheme == scheme and math.isfinite(case.found["ttt_norm"].mean)]
        places, found = [case.redundancy for case in mine], [case.found[name] for case in mine]
        style = {"fmt": "o-", "color": _COLOUR[scheme], "markersize": 3, "linewidth": 1.2, "capsize": 2}
        means, widths = [one.mean for one in found], [one.half_width or 0.0 for one in found]
        axes.errorbar(places, means, widths, label=f"{_NAME[scheme]}, simulated", **style)


def _table_2(axes, groups: int, part: int) -> None:
    points = [(TABLE_2[groups, scheme][0], TABLE_2[groups, scheme][part]) for scheme in ("spare", "replication")]
    axes.plot(*zip(*points, strict=True), "x", label="Table 2", markersize=7, markeredgewidth=2, **_PAPER)
