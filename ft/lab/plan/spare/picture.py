"""Draw the picture of ``ft plan spare optimize``: time to train and availability over the redundancy of SPARe.

The redundancy is the number of groups of ranks that host each part of a step's data. Availability is the share of the
time that advances the training.
"""

import math
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ft.lab.plan.spare.optimum import WITHOUT, Choice, Optimum
from ft.lab.simulate.spare.scenario import Scenario
from ft.show import palette
from ft.show.axes import Percents
from ft.show.text import seconds

_SIZE_IN, _DPI = (10.0, 4.4), 100
_HIGHEST = 2.0
"""Upper limit of the time axis relative to the best time; larger times would hide the differences among the good ones.
"""

_THEORY, _SIMULATED = palette.QUIET, palette.LATER_WORKERS[0]


def draw(asked: Scenario, found: Optimum, path: Path) -> None:
    """Write the picture as PNG.

    Raises:
        OSError: the file cannot be written.
    """
    figure = Figure(figsize=_SIZE_IN, dpi=_DPI, facecolor=palette.PAPER, layout="constrained")
    FigureCanvasAgg(figure)
    title = f"SPARe with {asked.job.groups} groups, a failure every {seconds(asked.mtbf_s)}"
    figure.suptitle(title, x=0.012, ha="left", fontsize=13, color=palette.INK, weight="bold")
    times, shares = figure.subplots(1, 2)
    _curves(times, found, "ttt_norm", "time to train, relative to a run without failures")
    _curves(shares, found, "availability", "share of the time that advances training")
    shares.yaxis.set_major_formatter(Percents())
    low = min(min(one.ttt_norm, _simulated(one)) for one in (found.without, *found.choices))
    times.set_ylim(0.95 * low, _HIGHEST * low)
    place = None if found.recommended == WITHOUT else found.recommended
    if place is not None:
        times.axvline(place, color=palette.LOSS, linewidth=1, linestyle=":")
    times.annotate(
        "recommended: checkpoints alone" if place is None else f"recommended: R = {place}",
        (0.5 if place is None else place, 0.97),
        xycoords=("axes fraction" if place is None else "data", "axes fraction"),
        xytext=(4, 0),
        textcoords="offset points",
        va="top",
        fontsize=9,
        color=palette.LOSS,
    )
    times.legend(frameon=False, fontsize=9, loc="center right")
    figure.savefig(path, dpi=_DPI, format="png")


def _simulated(one: Choice) -> float:
    return math.inf if one.simulated is None else one.simulated.found["ttt_norm"].mean


def _curves(axes, found: Optimum, name: str, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=10, color=palette.INK)
    axes.set_xlabel("redundancy R", fontsize=9, color=palette.QUIET)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.tick_params(labelsize=9, colors=palette.QUIET)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color=palette.FAINT, linewidth=0.6)
    places = [one.redundancy for one in found.choices]
    axes.plot(places, [getattr(one, name) for one in found.choices], color=_THEORY, label="formulas (7) and (2)")
    simulated = [
        (one.redundancy, one.simulated.found[name])
        for one in found.choices
        if one.simulated is not None and math.isfinite(one.simulated.found["ttt_norm"].mean)
    ]
    alone = found.without if found.without.simulated is None else found.without.simulated.found
    level = getattr(alone, name) if alone is found.without else alone[name].mean
    if math.isfinite(level):
        axes.axhline(level, color=palette.OUTCOME["restart"], linewidth=1, linestyle="--", label="checkpoints alone")
    if simulated:
        means, widths = [each.mean for _, each in simulated], [each.half_width or 0.0 for _, each in simulated]
        style = {"fmt": "o-", "color": _SIMULATED, "markersize": 4, "linewidth": 1.4, "capsize": 2}
        axes.errorbar([place for place, _ in simulated], means, widths, label="simulated", **style)
