"""Helpers for the matplotlib axes of this project's pictures: style, legends, and a placeholder for empty panels."""

import io
from collections.abc import Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import Formatter

from ft.base.errors import UserError
from ft.show import palette

WIDTH_IN, DPI = 12.0, 150
STYLE = {"fontsize": 9, "color": palette.QUIET}
"""Font size and colour of axis labels and other texts beside the plotted data."""


class Percents(Formatter):
    """Tick formatter that shows shares as percentages, with as many decimals as distinguish all ticks of an axis."""

    def __call__(self, value: float, pos: int | None = None) -> str:
        return self.format_ticks([value])[0]

    def format_ticks(self, values: Sequence[float]) -> list[str]:
        for decimals in range(10):
            shown = [f"{100 * value:.{decimals}f}%" for value in values]
            exact = all(abs(100 * value - round(100 * value, decimals)) < 1e-9 for value in values)
            if exact and len(set(shown)) == len(set(values)):
                break
        return shown


def rows(title: str, heights: Sequence[float]) -> tuple[Figure, Sequence]:
    """Return a figure with a title and a column of axes, and the axes; ``heights`` are their heights in inches."""
    figure = Figure(figsize=(WIDTH_IN, sum(heights) + 1.9), dpi=DPI, facecolor=palette.PAPER, layout="constrained")
    FigureCanvasAgg(figure)
    figure.get_layout_engine().set(h_pad=0.1, hspace=0.04, w_pad=0.12)
    figure.suptitle(title, x=0.012, ha="left", fontsize=13, color=palette.INK, weight="bold")
    return figure, figure.subplots(len(heights), 1, gridspec_kw={"height_ratios": heights})


def as_png(figure: Figure) -> bytes:
    """Return the picture as the content of a PNG file."""
    content = io.BytesIO()
    figure.savefig(content, dpi=DPI, format="png")
    return content.getvalue()


def save(figure: Figure, path: Path) -> None:
    """Write a picture, as PNG, SVG or PDF by the ending of its path.

    Raises:
        UserError: the file cannot be written.
    """
    try:
        figure.savefig(path, dpi=DPI, format=path.suffix[1:] or None)
    except (OSError, ValueError) as error:
        fix = "give --plot a path in a folder, with the ending .png, .svg or .pdf"
        raise UserError(f"the picture {path} cannot be written: {error}", fix) from error


def plain(axes, title: str, pad: int = 6) -> None:
    """Hide all spines except the bottom one, and put the title at the left.

    Args:
        pad: distance of the title from the axes, in points.
    """
    axes.set_title(title, loc="left", fontsize=10, color=palette.INK, pad=pad)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(palette.FAINT)
    axes.tick_params(length=0, labelsize=9, labelcolor=palette.QUIET)


def empty(axes, text: str) -> None:
    """Show ``text`` in the middle of axes that have nothing to draw."""
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", **STYLE)
    axes.set_xticks([])
    axes.set_yticks([])


def legend(axes, handles: Sequence, above: float = 1.0) -> None:
    """Add a legend as one row at the upper right.

    Args:
        handles: the entries, from left to right.
        above: lower edge of the row, as a share of the height of the axes.
    """
    axes.legend(
        handles=handles,
        loc="lower right",
        bbox_to_anchor=(1.0, above),
        ncols=len(handles),
        frameon=False,
        fontsize=9,
        labelcolor=palette.QUIET,
        handlelength=1.0,
        columnspacing=1.2,
        borderpad=0.1,
    )
