"""Plot of ``ft simulate hsdp``: effective training time of FT-HSDP, by formula and by simulation.

Bars show the cases, which differ in the time that replicas wait after a failure; curves show the sweeps over the number
of replicas and over the time between failures.
"""

from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from ft.lab.simulate.hsdp.answer import Answer
from ft.lab.simulate.hsdp.cases import Job
from ft.lab.simulate.hsdp.history import EXPONENTIAL
from ft.show import palette
from ft.show.axes import Percents
from ft.show.text import percent, seconds

_SIZE_IN, _DPI = (11.0, 7.2), 100
_STYLE = {"fontsize": 9, "color": palette.QUIET}
# The keys are those of the cases in :func:`ft.lab.simulate.hsdp.cases.cases`.
_COLOUR = {
    "sync": palette.OUTCOME["restart"],
    "formula": "#c8322b",
    "measured": "#e8853d",
    "intended": "#d9a514",
    "intended_rejoin": "#b59a5b",
    "ours_hang": "#4f94c4",
    "ours": "#3f8f55",
}


def draw(job: Job, found: Answer, path: Path) -> None:
    """Write the plot as PNG.

    Raises:
        OSError: the file cannot be written.
    """
    figure = Figure(figsize=_SIZE_IN, dpi=_DPI, facecolor=palette.PAPER, layout="constrained")
    FigureCanvasAgg(figure)
    figure.get_layout_engine().set(h_pad=0.12, hspace=0.06, w_pad=0.12)
    title = f"{job.gpus:,} GPUs, a failure every {seconds(job.interval_s)}: effective training time"
    figure.suptitle(title, x=0.012, ha="left", fontsize=13, color=palette.INK, weight="bold")
    parts = figure.subplot_mosaic([["bars", "bars"], ["replicas", "interval"]], height_ratios=(1.0, 1.3))
    _draw_bars(parts["bars"], job, found)
    _draw_curves(parts["replicas"], found, found.by_replicas, "replicas", job.replicas)
    _draw_curves(parts["interval"], found, found.by_interval, "minutes between two failures", job.interval_s / 60)
    figure.savefig(path, dpi=_DPI, format="png")


def _draw_bars(axes, job: Job, found: Answer) -> None:
    _plain(axes, f"{job.replicas} replicas: bars simulated with independent failures, circles the paper's formula")
    for place, row in enumerate(found.found):
        value = row.simulated[EXPONENTIAL].effective
        axes.barh(place, value, height=0.6, color=_COLOUR[row.case.key], alpha=0.85)
        axes.plot(row.formula, place, "o", color=palette.INK, markerfacecolor=palette.PAPER, markersize=5)
        waits = f"{seconds(row.case.stall_s)} + {seconds(row.case.rejoin_s)}"
        text = f"{percent(value)}, formula {percent(row.formula)}; all wait {waits}"
        axes.text(max(value, row.formula) + 0.012, place, text, va="center", **_STYLE)
    axes.set_yticks(range(len(found.found)), [row.case.name for row in found.found])
    axes.set_ylim(len(found.found) - 0.5, -0.5)
    axes.set_xlim(0, 1.4)
    axes.set_xticks([0, 0.2, 0.4, 0.6, 0.8, 1.0])
    axes.xaxis.set_major_formatter(Percents())


def _draw_curves(axes, found: Answer, rows: dict[float, dict[str, float]], unit: str, here: float) -> None:
    _plain(axes, f"by {unit}")
    for row in found.found:
        key = row.case.key
        axes.plot(list(rows), [values[key] for values in rows.values()], color=_COLOUR[key], linewidth=2)
        axes.plot(here, rows[here][key], "o", color=_COLOUR[key], markersize=5)
    axes.axvline(here, color=palette.FAINT, linewidth=1, zorder=0)
    axes.set_xscale("log")
    axes.set_xticks(list(rows), [f"{key:g}" for key in rows])
    axes.minorticks_off()
    axes.set_ylim(0, 1.02)
    axes.yaxis.set_major_formatter(Percents())
    axes.grid(axis="y", color=palette.FAINT, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.set_xlabel(unit, **_STYLE)


def _plain(axes, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=10, color=palette.INK, pad=8)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(palette.FAINT)
    axes.tick_params(length=0, pad=6, labelsize=9, labelcolor=palette.QUIET)
