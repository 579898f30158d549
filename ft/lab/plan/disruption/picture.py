"""Draw the picture of ``ft plan disruption``: cost of a failure, and effective training time over cluster size."""

import math
from dataclasses import replace
from pathlib import Path

import numpy
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from ft.lab.plan.disruption.answer import Answer, answer
from ft.lab.plan.disruption.flags import Plan
from ft.show import palette
from ft.show.axes import Percents
from ft.show.text import percent, seconds

_SIZE_IN, _DPI = (11.0, 7.2), 150
_STYLE = {"fontsize": 9, "color": palette.QUIET}
_PART = {
    "overhead": "#b9c4cf",
    "detect": palette.PHASE["detect"],
    "rebuild": palette.PHASE["rebuild"],
    "restore": palette.PHASE["restore"],
    "hot-swap": palette.PHASE["rebuild"],
    "restart": palette.OUTCOME["restart"],
    "replay": palette.PHASE["release"],
}
_WAY = {"restart": palette.OUTCOME["restart"], "restart_young": "#9a86c0", "hot_swap": "#3f8f55"}
_UNITS = ((3600.0, "hours"), (60.0, "minutes"), (1.0, "seconds"))


def draw(plan: Plan, found: Answer, path: Path) -> None:
    """Write the picture as PNG.

    Raises:
        OSError: the file cannot be written.
    """
    figure = Figure(figsize=_SIZE_IN, dpi=_DPI, facecolor=palette.PAPER, layout="constrained")
    FigureCanvasAgg(figure)
    figure.get_layout_engine().set(h_pad=0.12, hspace=0.06, w_pad=0.12)
    cluster = plan.cluster
    title = f"{cluster.gpus:,} GPUs, a failure every {seconds(cluster.mttf_s)}"
    figure.suptitle(title, x=0.012, ha="left", fontsize=13, color=palette.INK, weight="bold")
    bars, curves = figure.subplots(2, 1, gridspec_kw={"height_ratios": (1.0, 1.7)})
    _draw_bars(bars, found)
    _draw_curves(curves, plan, found)
    figure.savefig(path, dpi=_DPI, format="png")


def _draw_bars(axes, found: Answer) -> None:
    _plain(axes, "Expected cost of one failure")
    most = max(way.cost.total for way in found.ways) or 1.0
    unit, unit_name = next(((u, n) for u, n in _UNITS if most >= 2 * u), _UNITS[-1])
    drawn = {}
    for place, way in enumerate(found.ways):
        left = 0.0
        for part, value in {"overhead": way.cost.overhead, **way.cost.latency, "replay": way.cost.replay}.items():
            axes.barh(place, value / unit, left=left, height=0.6, color=_PART[part])
            left += value / unit
            drawn[part] = drawn.get(part, 0.0) + value
        text = f"{seconds(way.cost.total)}, {seconds(way.cost.recovery)} of it after the failure"
        axes.text(left + most / unit * 0.008, place, text, va="center", **_STYLE)
    names = [f"{way.name}\n{_checkpoints(way.interval)}" for way in found.ways]
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlim(0, most / unit * 1.38)
    axes.set_xlabel(unit_name, **_STYLE)
    handles = [Patch(color=_PART[part], label=part) for part in _PART if drawn.get(part)]
    _legend(axes, handles)


def _draw_curves(axes, plan: Plan, found: Answer) -> None:
    _plain(axes, "Effective training time as the cluster grows (GPUs fail alike, all other times as given)")
    gpus = plan.cluster.gpus * numpy.logspace(-1, 1, 81)
    answers = [answer(replace(plan, cluster=_scaled(plan, size))) for size in gpus]
    ends = []
    for i, way in enumerate(found.ways):
        share = [one.ways[i].efficiency for one in answers]
        axes.plot(gpus, share, color=_WAY[way.key], linewidth=2)
        axes.plot(plan.cluster.gpus, way.efficiency, "o", color=_WAY[way.key], markersize=6)
        ends.append((share[-1], way))
    bottom = math.floor(9 * min(share for share, _ in ends)) / 10
    place = bottom - 1.0
    for share, way in sorted(ends, key=lambda end: end[0]):
        place = max(share, place + 0.055 * (1 - bottom))
        text = f"{way.name}: {percent(way.efficiency)} here"
        axes.text(gpus[-1] * 1.03, place, text, va="center", fontsize=9, color=_WAY[way.key])
    axes.axvline(plan.cluster.gpus, color=palette.FAINT, linewidth=1, zorder=0)
    axes.set_xscale("log")
    axes.set_xlim(gpus[0], gpus[-1])
    axes.set_ylim(bottom, 1 + 0.02 * (1 - bottom))
    ticks = [plan.cluster.gpus * factor for factor in (0.1, 0.2, 0.5, 1, 2, 5, 10)]
    axes.set_xticks(ticks, [f"{tick:,.0f}" if tick >= 10 else f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.yaxis.set_major_formatter(Percents())
    axes.grid(axis="y", color=palette.FAINT, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.set_xlabel("GPUs", **_STYLE)


def _scaled(plan: Plan, gpus: float):
    """Return the plan's cluster scaled to ``gpus`` GPUs; the time between two failures shrinks as the cluster grows."""
    cluster = plan.cluster
    # The checkpoint interval is not scaled. The number of standbys grows with the cluster, so that they do not run out.
    standbys = round(cluster.standby_nodes * max(1.0, gpus / cluster.gpus))
    return replace(cluster, mttf_s=cluster.mttf_s * cluster.gpus / gpus, standby_nodes=standbys)


def _checkpoints(interval: int) -> str:
    return f"every {interval:,} steps" if interval else "no checkpoints"


def _plain(axes, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=10, color=palette.INK, pad=8)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(palette.FAINT)
    axes.tick_params(length=0, pad=6, labelsize=9, labelcolor=palette.QUIET)


def _legend(axes, handles: list) -> None:
    axes.legend(
        handles=handles,
        loc="lower right",
        bbox_to_anchor=(1.0, 1.0),
        ncols=len(handles),
        frameon=False,
        fontsize=9,
        labelcolor=palette.QUIET,
        handlelength=1.0,
        columnspacing=1.2,
        borderpad=0.1,
    )
