"""Draw a pipeline schedule: the units that each stage runs over time.

A unit is the forward or backward pass of one microbatch on one stage. Swapped units belong to microbatches that pass
the first two and the last two stages in swapped order (CheckFree+, section 4.3 of the CheckFree paper).
"""

from pathlib import Path

from matplotlib.patches import Patch

from ft.show import axes as look
from ft.show import palette
from ft.show.text import percent
from ft.systems.schedule.choose import Planned
from ft.systems.schedule.program import straight

_COLOURS = {
    (False, False): ("#8fb3d9", "forward"),
    (False, True): ("#4f7fb0", "backward"),
    (True, False): ("#e9c486", "swapped forward"),
    (True, True): ("#b07d2a", "swapped backward"),
}
_LANE = 0.84
_NUMBERED = 340
"""Largest length of a schedule, in durations of its shortest unit, at which the microbatches' numbers are readable."""


def draw(found: Planned, path: Path) -> None:
    """Write the picture as PNG.

    Raises:
        OSError: the file cannot be written.
    """
    shape = found.shape
    title = f"{found.kind}: {shape.stages} stages, {shape.microbatches} microbatches"
    title += ", never ends" if found.bubble is None else f", {percent(found.bubble)} bubbles"
    figure, axes = look.rows(title, (0.34 * shape.stages + 0.6,))
    _lanes(axes, found)
    figure.savefig(path, format="png")


def _lanes(axes, found: Planned) -> None:
    look.plain(axes, "units of each stage with the numbers of their microbatches; white is idle time", pad=22)
    normal = straight(found.shape.stages, found.chunks)
    ways = found.program.routes.ways
    end = max((end for _, end in found.ran.times.values()), default=1.0)
    numbered = end * found.chunks / min(found.shape.f, found.shape.b) <= _NUMBERED
    for unit, (start, stop) in found.ran.times.items():
        colour, _ = _COLOURS[ways[unit.microbatch] != normal, unit.backward]
        bar = (start, stop - start)
        axes.broken_barh(
            [bar], (unit.stage - _LANE / 2, _LANE), facecolors=colour, edgecolor=palette.PAPER, linewidth=0.5
        )
        if numbered:
            style = {"ha": "center", "va": "center", "fontsize": 5, "color": palette.INK}
            axes.text((start + stop) / 2, unit.stage, str(unit.microbatch), **style)
    axes.set_xlim(0, end)
    axes.set_yticks(range(found.shape.stages), [f"stage {stage}" for stage in range(found.shape.stages)])
    axes.invert_yaxis()
    axes.set_xlabel("time in the unit of --forward", **look.STYLE)
    seen = {ways[unit.microbatch] != normal for unit in found.ran.times}
    look.legend(
        axes, [Patch(color=colour, label=label) for (way, _), (colour, label) in _COLOURS.items() if way in seen]
    )
