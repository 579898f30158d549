"""Draw the loss over steps or tokens as inline SVG for ``report.html``, with a vertical line at each failure."""

import html
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.ticker import MaxNLocator

from ft.record.block import what_failed
from ft.record.recoveries import Recovery
from ft.record.run import number
from ft.show import palette

_WIDTH, _HEIGHT = 1180, 330
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 14, 14, 38
_MOST_POINTS = 2000


@dataclass(frozen=True)
class Mark:
    """A vertical line across the loss curve.

    Attributes:
        at: position of the line on the horizontal axis, in steps or tokens.
        colour: colour of the line.
        title: text of the tooltip.
    """

    at: float
    colour: str
    title: str


def loss_svg(metrics: Sequence[dict[str, Any]], found: Sequence[Recovery]) -> str:
    """Return the loss over the steps as SVG, or a sentence where no losses are on record."""
    points = [(m["step"], loss) for m in metrics if (loss := number(m, "loss")) is not None]
    marks = [
        Mark(r.step + 1, palette.OUTCOME[r.outcome], f"recovery {r.number}, step {r.step + 1}: {what_failed(r)}")
        for r in found
        if r.step is not None
    ]
    return curve(points, "step", marks) if points else "<p>The run has recorded no losses (metrics.jsonl).</p>"


def curve(points: Sequence[tuple[float, float]], over: str, marks: Sequence[Mark]) -> str:
    """Return the loss as SVG over an amount that grows from point to point.

    Args:
        points: (amount, loss); at least one.
        over: what the amount counts, such as "step" or "tokens"; the label of the axis.
        marks: vertical lines to draw.
    """
    points = [*points[: -1 : max(1, len(points) // _MOST_POINTS)], points[-1]]
    first, last = points[0][0], max(points[-1][0], points[0][0] + 1)
    ticks = [float(t) for t in MaxNLocator(5).tick_values(min(p[1] for p in points), max(p[1] for p in points))]
    low, high = ticks[0], ticks[-1]

    def x(at: float) -> float:
        return _LEFT + (at - first) / (last - first) * (_WIDTH - _LEFT - _RIGHT)

    def y(loss: float) -> float:
        return _HEIGHT - _BOTTOM - (loss - low) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)

    parts = [_across(y(tick), f"{tick:g}") for tick in ticks]
    at_bottom = [s for s in MaxNLocator(10, integer=True).tick_values(first, last) if first <= s <= last]
    parts += [_text(x(at), _HEIGHT - _BOTTOM + 18, _short(at), "middle") for at in at_bottom]
    parts.append(_text((_LEFT + _WIDTH) / 2, _HEIGHT - 3, over, "middle"))
    parts += [_line(x(mark.at), mark) for mark in marks if first <= mark.at <= last]
    line = " ".join(f"{x(at):.1f},{y(loss):.1f}" for at, loss in points)
    parts.append(f'<polyline points="{line}" fill="none" stroke="{palette.LOSS}" stroke-width="1.8"/>')
    if len(points) == 1:
        parts.append(f'<circle cx="{x(first):.1f}" cy="{y(points[0][1]):.1f}" r="3" fill="{palette.LOSS}"/>')
    label = f"loss from {over} {first} to {points[-1][0]}"
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{label}">{"".join(parts)}</svg>'


def _short(value: float) -> str:
    """Return a short form of a number, such as "20000", "250k", "1.5M" or "30B"."""
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e5, "k")):
        if value >= size:
            return f"{value / (1e3 if unit == 'k' else size):g}{unit}"
    return f"{value:g}"


def _across(at: float, label: str) -> str:
    line = f'<line x1="{_LEFT}" y1="{at:.1f}" x2="{_WIDTH - _RIGHT}" y2="{at:.1f}" stroke="{palette.FAINT}"/>'
    return line + _text(_LEFT - 8, at + 4, label, "end")


def _line(at: float, mark: Mark) -> str:
    return (
        f'<g class="fault"><title>{html.escape(mark.title)}</title><line x1="{at:.1f}" y1="{_TOP}" x2="{at:.1f}" '
        f'y2="{_HEIGHT - _BOTTOM}" stroke="{mark.colour}" stroke-dasharray="5 3"/>'
        f'<circle cx="{at:.1f}" cy="{_TOP}" r="4.5" fill="{mark.colour}"/></g>'
    )


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="12" fill="{palette.QUIET}">'
        f"{html.escape(text)}</text>"
    )
