"""The loss over the steps, as inline SVG with the faults marked."""

import html
from collections.abc import Sequence
from typing import Any

from matplotlib.ticker import MaxNLocator

from ft.report import palette
from ft.report.block import what_failed
from ft.report.recoveries import Recovery
from ft.report.run import number

_WIDTH, _HEIGHT = 1180, 330
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 14, 14, 38
_MOST_POINTS = 2000


def loss_svg(metrics: Sequence[dict[str, Any]], found: Sequence[Recovery]) -> str:
    """The curve, or a sentence where there is no loss to draw."""
    points = [(m["step"], loss) for m in metrics if (loss := number(m, "loss")) is not None]
    if not points:
        return "<p>No losses are on record (metrics.jsonl).</p>"
    points = [*points[: -1 : max(1, len(points) // _MOST_POINTS)], points[-1]]
    first, last = points[0][0], max(points[-1][0], points[0][0] + 1)
    ticks = [float(t) for t in MaxNLocator(5).tick_values(min(p[1] for p in points), max(p[1] for p in points))]
    low, high = ticks[0], ticks[-1]

    def x(step: float) -> float:
        return _LEFT + (step - first) / (last - first) * (_WIDTH - _LEFT - _RIGHT)

    def y(loss: float) -> float:
        return _HEIGHT - _BOTTOM - (loss - low) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)

    parts = [_across(y(tick), f"{tick:g}") for tick in ticks]
    steps = [s for s in MaxNLocator(10, integer=True).tick_values(first, last) if first <= s <= last]
    parts += [_text(x(step), _HEIGHT - _BOTTOM + 18, f"{step:g}", "middle") for step in steps]
    parts.append(_text((_LEFT + _WIDTH) / 2, _HEIGHT - 3, "step", "middle"))
    parts += [_mark(x(r.step + 1), r) for r in found if r.step is not None and first <= r.step + 1 <= last]
    line = " ".join(f"{x(step):.1f},{y(loss):.1f}" for step, loss in points)
    parts.append(f'<polyline points="{line}" fill="none" stroke="{palette.LOSS}" stroke-width="1.8"/>')
    if len(points) == 1:
        parts.append(f'<circle cx="{x(first):.1f}" cy="{y(points[0][1]):.1f}" r="3" fill="{palette.LOSS}"/>')
    label = f"loss from step {first} to {points[-1][0]}"
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{label}">{"".join(parts)}</svg>'


def _across(at: float, label: str) -> str:
    line = f'<line x1="{_LEFT}" y1="{at:.1f}" x2="{_WIDTH - _RIGHT}" y2="{at:.1f}" stroke="{palette.FAINT}"/>'
    return line + _text(_LEFT - 8, at + 4, label, "end")


def _mark(at: float, recovery: Recovery) -> str:
    colour = palette.OUTCOME[recovery.outcome]
    title = html.escape(f"recovery {recovery.number}, step {recovery.step + 1}: {what_failed(recovery)}")
    return (
        f'<g class="fault"><title>{title}</title><line x1="{at:.1f}" y1="{_TOP}" x2="{at:.1f}" '
        f'y2="{_HEIGHT - _BOTTOM}" stroke="{colour}" stroke-dasharray="5 3"/>'
        f'<circle cx="{at:.1f}" cy="{_TOP}" r="4.5" fill="{colour}"/></g>'
    )


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="12" fill="{palette.QUIET}">'
        f"{html.escape(text)}</text>"
    )
