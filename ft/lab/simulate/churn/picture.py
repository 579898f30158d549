"""Plot of ``ft simulate churn``: time to train by failure rate, and the loss curve of one run of each strategy."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from ft.lab.simulate.churn.scenario import Scenario
from ft.lab.simulate.churn.strategy import BEST, CHECKFREE, CHECKPOINT, NAMES, PLUS, REDUNDANT
from ft.lab.simulate.churn.study import HIGH, LOW, Row, outcome, row
from ft.show import palette
from ft.show.axes import Percents

_SIZE_IN, _DPI = (12.0, 5.0), 110
_STYLE = {"fontsize": 9, "color": palette.QUIET}
_COLOUR = {CHECKPOINT: "#c8322b", BEST: "#e8938f", REDUNDANT: "#7468b3", CHECKFREE: "#d98e04", PLUS: "#33659c"}
_POINTS, _SEEDS = 12, 60
"""Number of failure rates on each curve, and maximum number of seeds per rate."""


def draw(asked: Scenario, rows: Sequence[Row], path: Path) -> None:
    """Write the plot as PNG.

    Args:
        asked: the scenario; it is simulated again at more failure rates for the curves.
        rows: the results of the scenario.
        path: path of the file.

    Raises:
        OSError: the file cannot be written.
    """
    figure = Figure(figsize=_SIZE_IN, dpi=_DPI, facecolor=palette.PAPER, layout="constrained")
    FigureCanvasAgg(figure)
    figure.get_layout_engine().set(w_pad=0.15)
    title = f"{asked.costs.stages} stages that are lost whole: time to the same loss"
    figure.suptitle(title, x=0.012, ha="left", fontsize=13, color=palette.INK, weight="bold")
    hours, losses = figure.subplots(1, 2)
    if asked.rates:
        _draw_hours(hours, asked, rows)
    else:
        _draw_bars(hours, rows)
    _draw_losses(losses, asked)
    figure.savefig(path, dpi=_DPI, format="png")


def _draw_hours(axes, asked: Scenario, rows: Sequence[Row]) -> None:
    published = any(row.published is not None for row in rows)
    markers = ", circles: the paper's" if published else ""
    _plain(axes, f"hours (lines: mean, bands: {LOW:.0%} to {HIGH:.0%}{markers})")
    fewer = replace(asked, seeds=min(asked.seeds, _SEEDS))
    most = 1.1 * max(asked.rates) or 0.01
    rates = sorted({*(most * place / _POINTS for place in range(_POINTS + 1)), *asked.rates})
    for key in asked.strategies:
        found = [row(fewer, key, rate) for rate in rates]
        style = {"color": _COLOUR[key]}
        axes.plot(rates, [_drawn(each.hours) for each in found], linewidth=2, label=NAMES[key], **style)
        low, high = ([_drawn(getattr(each, name)) for each in found] for name in ("low", "high"))
        axes.fill_between(rates, low, high, alpha=0.13, linewidth=0, **style)
        known = [each for each in rows if each.strategy == key and each.published is not None]
        places, values = [each.rate for each in known], [each.published for each in known]
        axes.plot(places, values, "o", markersize=6, markerfacecolor=palette.PAPER, markeredgewidth=1.6, **style)
    shown = [value for each in rows for value in (each.hours, each.published) if value is not None]
    axes.set_ylim(0, 1.15 * min(max(shown, default=1.0), 3.0 * min(shown, default=1.0)))
    axes.set_xlim(0, most)
    axes.xaxis.set_major_formatter(Percents())
    axes.set_xlabel("probability of each stage to fail within an hour", **_STYLE)
    axes.legend(frameon=False, fontsize=9, loc="lower right", labelcolor=palette.QUIET)


def _drawn(value: float | None) -> float:
    return math.nan if value is None else value


def _draw_bars(axes, rows: Sequence[Row]) -> None:
    _plain(axes, "hours, with the failures of the trace")
    for place, each in enumerate(rows):
        axes.barh(place, each.hours or 0.0, height=0.6, color=_COLOUR[each.strategy], alpha=0.85)
        text = "never" if each.hours is None else f"  {each.hours:.1f} h"
        axes.text(each.hours or 0.0, place, text, va="center", **_STYLE)
    axes.set_yticks(range(len(rows)), [NAMES[each.strategy] for each in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(0, 1.2 * max((each.hours or 0.0 for each in rows), default=1.0) or 1.0)


def _draw_losses(axes, asked: Scenario) -> None:
    rate = sorted(asked.rates)[len(asked.rates) // 2] if asked.rates else None
    when = "the trace" if rate is None else f"{100 * rate:.4g} % an hour, seed {asked.seed}"
    _plain(axes, f"loss of one run of each: {when}")
    law, one = asked.law, replace(asked, seeds=1)
    for key in asked.strategies:
        history = outcome(one, key, rate, told=True)[1].history
        hours, losses = zip(*history, strict=True)
        axes.plot(hours, losses, color=_COLOUR[key], linewidth=1.0, label=NAMES[key])
        if math.isclose(losses[-1], law.target, rel_tol=0.05):
            axes.plot(hours[-1], losses[-1], "o", color=_COLOUR[key], markersize=5)
    axes.axhline(law.target, color=palette.QUIET, linewidth=0.8, linestyle=":", zorder=0)
    axes.set_ylim(law.target - 0.12 * law.above, law.target + 0.9 * law.above)
    axes.set_xlim(left=0)
    axes.set_xlabel("hours", **_STYLE)


def _plain(axes, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=10, color=palette.INK, pad=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(palette.FAINT)
    axes.tick_params(length=0, pad=5, labelsize=9, labelcolor=palette.QUIET)
    axes.grid(color=palette.FAINT, linewidth=0.6)
    axes.set_axisbelow(True)
