"""Plot of ``ft simulate recovery``: connections that a hot-swap rebuilds, and seconds it takes, by number of ranks."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullFormatter

from ft.lab.simulate.recovery.deadpool import RECOVERY_S
from ft.lab.simulate.recovery.fit import Fit
from ft.lab.simulate.recovery.sweep import FULL, NODE, RANK, Entry
from ft.show import palette

_SIZE_IN, _DPI = (11.0, 5.4), 150
_COLOUR = {FULL: palette.OUTCOME["restart"], NODE: "#d98e04", RANK: "#3f8f55"}
_NAME = {FULL: "all groups", NODE: "after the loss of a node", RANK: "after the loss of a rank"}
_WIDTH = {FULL: 2, NODE: 4.5, RANK: 2}
"""Line widths. The curves for a node and for a rank often coincide, so the first is drawn wider, behind the second."""

_PAPER = palette.FAULT
_STYLE = {"fontsize": 9, "color": palette.QUIET}
_MOST_TICKS = 7


def draw(entries: Sequence[Entry], fitted: Fit | None, path: Path) -> None:
    """Write the plot as PNG.

    Raises:
        OSError: the file cannot be written.
    """
    wide = _SIZE_IN if fitted is not None else (_SIZE_IN[0] / 1.8, _SIZE_IN[1])
    figure = Figure(figsize=wide, dpi=_DPI, facecolor=palette.PAPER, layout="constrained")
    FigureCanvasAgg(figure)
    figure.get_layout_engine().set(h_pad=0.12, w_pad=0.12, wspace=0.06)
    axes = figure.subplots(1, 1 if fitted is None else 2, squeeze=False)[0]
    _draw_connections(axes[0], entries)
    if fitted is not None:
        _draw_times(axes[1], entries, fitted)
    style = {"frameon": False, "fontsize": 9, "labelcolor": palette.QUIET}
    handles = [Line2D([], [], color=_COLOUR[kind], linewidth=2.5, label=_NAME[kind]) for kind in (FULL, NODE, RANK)]
    figure.legend(handles=handles, loc="outside lower left", ncols=1, **style)
    if fitted is not None:
        figure.legend(handles=_lines(), loc="outside lower right", ncols=2, **style)
    figure.savefig(path, dpi=_DPI, format="png")


def _draw_connections(axes, entries: Sequence[Entry]) -> None:
    _plain(axes, "Connections to build, every survivor blocked", entries)
    for kind in (FULL, NODE, RANK):
        points = [(e.sizes.ranks, r.most.connections) for e in entries for r in e.rebuilds if r.kind == kind]
        if points:
            axes.plot(*zip(*points, strict=True), color=_COLOUR[kind], linewidth=_WIDTH[kind], marker="o", markersize=4)
    axes.yaxis.set_major_formatter(lambda value, _: _short(value))


def _draw_times(axes, entries: Sequence[Entry], fitted: Fit) -> None:
    _plain(axes, "Time to build them", entries)
    for kind in (FULL, NODE, RANK):
        found = [(e.sizes.ranks, r.most) for e in entries for r in e.rebuilds if r.kind == kind and r.most.groups]
        if not found:
            continue
        ranks = [one for one, _ in found]
        spread = [fitted.spread_out(work) for _, work in found]
        here = [fitted.here.at(work) for _, work in found]
        axes.plot(ranks, spread, color=_COLOUR[kind], linewidth=_WIDTH[kind])
        axes.plot(ranks, here, color=_COLOUR[kind], linewidth=1, linestyle=(0, (4, 3)))
        measured = [(n, s) for n, work in found if (s := fitted.measured(n, kind, work)) is not None]
        if measured:
            axes.plot(*zip(*measured, strict=True), "o", color=_COLOUR[kind], markersize=6, zorder=4)
    axes.plot(*zip(*RECOVERY_S.items(), strict=True), color=_PAPER, marker="D", markersize=6, linewidth=1, zorder=4)
    axes.axvspan(fitted.most_ranks, axes.get_xlim()[1], color=palette.FAINT, alpha=0.35, linewidth=0, zorder=0)
    axes.text(fitted.most_ranks * 1.08, 0.99, "extrapolated", transform=axes.get_xaxis_transform(), va="top", **_STYLE)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g} s" if value >= 1 else f"{value * 1e3:g} ms")


def _lines() -> list[Line2D]:
    ink = palette.QUIET
    return [
        Line2D([], [], color=ink, marker="o", linestyle="", label="measured, all ranks on this machine's cores"),
        Line2D([], [], color=ink, linewidth=1, linestyle=(0, (4, 3)), label="fit to that"),
        Line2D([], [], color=ink, linewidth=2, label="fit, a core per rank and no network"),
        Line2D([], [], color=_PAPER, marker="D", linewidth=1, label="DEADPOOL, whole recovery"),
    ]


def _plain(axes, title: str, entries: Sequence[Entry]) -> None:
    axes.set_title(title, loc="left", fontsize=10, color=palette.INK, pad=8)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(palette.FAINT)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    ranks = sorted({entry.sizes.ranks for entry in entries})
    axes.set_xlim(ranks[0] * 0.85, ranks[-1] * 1.18)
    shown = ranks[:: -(-len(ranks) // _MOST_TICKS)]
    axes.set_xticks(shown, [f"{count:,}" for count in shown])
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.tick_params(which="both", length=0, pad=6, labelsize=9, labelcolor=palette.QUIET)
    axes.grid(axis="y", color=palette.FAINT, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.set_xlabel("logical ranks", **_STYLE)


def _short(value: float) -> str:
    for size, unit in ((1e9, " bn"), (1e6, " M"), (1e3, " k")):
        if value >= size:
            return f"{value / size:g}{unit}"
    return f"{value:g}"
