"""Pictures of ``ft plan buy``, ``ft plan spares`` and ``ft plan interval``: PNG, SVG or PDF, by the file's ending."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from ft.lab.plan.goodput.answer import VARIED, Answer, Change
from ft.protection.table import DOUBLE
from ft.show import axes as plot
from ft.show import palette
from ft.show.axes import STYLE, Percents
from ft.show.text import percent, seconds

_OURS, _TWICE, _BEST = "#4f7fb0", "#b9c4cf", "#3f8f55"
_LINES = ("#4b3f72", "#3f8f55", "#33659c", "#b07d2a", "#a8527f", "#2f8a97")


def pareto(found: Answer, path: Path) -> None:
    """Draw every row by cost and risk, and what would change the answer.

    Raises:
        UserError: the file cannot be written.
    """
    figure, (left, right) = plot.rows(f"{found.asked.gpus:,} GPUs: cost and risk of every protection", (3.3, 3.0))
    plot.plain(left, "Paid GPU hours per useful hour, and chance of losing more than an hour at once")
    rows = [row for row in found.rows if row.paid < 3.0 * found.recommended.paid]
    for row in rows:
        is_best = row is found.recommended
        colour = _BEST if is_best else _TWICE if DOUBLE in row.protection.names else _OURS
        left.plot(row.paid, row.hour_lost, "o", color=colour, markersize=9 if is_best else 5)
    spots: dict[tuple[int, float], list[int]] = {}
    width = max(row.paid for row in rows) - rows[0].paid or 1.0
    singly = [row for row in rows if DOUBLE not in row.protection.names]
    for number, row in enumerate(singly, 1):
        spots.setdefault((int(16 * (row.paid - rows[0].paid) / width), round(row.hour_lost, 1)), []).append(number)
    for numbers in spots.values():
        row = singly[numbers[0] - 1]
        at, text = (row.paid, row.hour_lost), ", ".join(map(str, numbers))
        left.annotate(text, at, (0, 7), textcoords="offset points", ha="center", **STYLE)
    names = [f"{n}  {row.protection.title}, {row.spares} standbys" for n, row in enumerate(singly, 1)]
    names.append("green: recommended; grey: with DMR")
    left.text(1.01, 1.0, "\n".join(names), transform=left.transAxes, va="top", **STYLE)
    left.set_xlabel("paid GPU hours per useful hour", **STYLE)
    left.set_ylabel("chance", **STYLE)
    left.set_ylim(-0.08, 1.08)
    left.yaxis.set_major_formatter(Percents())
    left.margins(x=0.1)
    _tornado(right, found)
    plot.save(figure, path)


def _tornado(axes, found: Answer) -> None:
    """Draw what would change the answer: a bar for each quantity, from the least to the greatest cost."""
    plot.plain(axes, "Recommended row if one quantity differs; where another row wins, its name")
    paid, ticks = found.recommended.paid, []
    for place, (key, name) in enumerate(VARIED.items()):
        mine = [change for change in found.changes if change.key == key]
        ticks.append(name)
        for change in mine:
            axes.plot([paid, change.paid], [place, place], color=_TWICE, linewidth=10, solid_capstyle="butt", zorder=1)
            axes.plot(change.paid, place, "|", color=palette.INK, markersize=12)
        for change in (min(mine, key=_paid), max(mine, key=_paid)) if mine else ():
            at, above = (change.paid, place), (0, 10)
            axes.annotate(f"x {change.factor:g}", at, above, textcoords="offset points", ha="center", **STYLE)
        wins = [
            f"{'below' if turn.factor < 1 else 'above'} {seconds(turn.value)} {turn.winner} wins"
            for turn in found.turns
            if turn.key == key
        ]
        axes.text(1.01, place, "\n".join(wins), transform=axes.get_yaxis_transform(), va="center", **STYLE)
    axes.axvline(paid, color=_BEST, linewidth=1)
    axes.set_yticks(range(len(ticks)), ticks)
    axes.set_ylim(len(ticks) - 0.4, -0.6)
    axes.set_xlabel("paid GPU hours per useful hour", **STYLE)


def _paid(change: Change) -> float:
    return change.paid


def curves(title: str, label: str, lines: Mapping[str, Sequence[tuple[float, float]]], path: Path, log: bool) -> None:
    """Draw the useful share of the time over a quantity, a line for each protection, its best point marked.

    Args:
        title: title of the picture.
        label: name of the quantity.
        lines: name -> (quantity, share).
        path: the file.
        log: whether the quantity has a logarithmic axis.

    Raises:
        UserError: the file cannot be written.
    """
    figure, axes = plot.rows(title, (3.0,))
    plot.plain(axes, "Useful share of the time")
    for colour, (name, points) in zip(_LINES, lines.items(), strict=False):
        axes.plot(*zip(*points, strict=True), color=colour, linewidth=2, label=name)
        best = max(points, key=lambda point: point[1])
        axes.plot(*best, "o", color=colour)
        axes.annotate(f"{percent(best[1])} at {best[0]:,.0f}", best, (6, 6), textcoords="offset points", **STYLE)
    if log:
        axes.set_xscale("log")
    axes.set_xlabel(label, **STYLE)
    axes.yaxis.set_major_formatter(Percents())
    axes.legend(frameon=False, fontsize=9, labelcolor=palette.QUIET)
    plot.save(figure, path)
