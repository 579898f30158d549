"""Draw who waits for whom in a hang: the ranks at fault at the left, and those that wait for them to the right."""

import textwrap
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from matplotlib.patches import FancyBboxPatch

from ft.faults.hang.causes import Cause, Diagnosis
from ft.faults.hang.format import Who
from ft.faults.hang.graph import Wait
from ft.faults.hang.inspection import Inspection
from ft.show import palette
from ft.show.axes import DPI, as_png, rows
from ft.show.text import capitalised

_MOST_BOXES, _MOST_COLUMNS = 8, 5
_WIDE, _HIGH, _GAP_X, _GAP_Y = 2.3, 0.8, 0.7, 0.25
_CHARACTERS = 34


@dataclass
class _Box:
    """Ranks that are drawn as one box.

    Attributes:
        on: the ranks that they wait for.
        x, y: lower left corner in inches.
    """

    ranks: set[int]
    title: str
    text: str
    on: set[int]
    at_fault: bool = False
    x: float = 0.0
    y: float = 0.0


def save(path: Path, seen: Inspection, found: Diagnosis) -> None:
    """Write the picture; the name's ending says the format, such as .png or .svg.

    Raises:
        OSError: the file cannot be written.
        ValueError: there is no such format.
    """
    _figure(seen, found).savefig(path, dpi=DPI)


def png(seen: Inspection, found: Diagnosis) -> bytes:
    """Return the picture as PNG."""
    return as_png(_figure(seen, found))


def _figure(seen: Inspection, found: Diagnosis):
    columns = _columns(seen, found)
    tall = max((len(column) for column in columns), default=1)
    height = tall * (_HIGH + _GAP_Y) + _GAP_Y
    width = max(4.0, len(columns) * (_WIDE + _GAP_X) + _GAP_X)
    figure, axes = rows(_title(seen, found), [height])
    figure.set_size_inches(max(width, 8.0), height + 0.9)
    axes.set_xlim(0, max(width, 8.0))
    axes.set_ylim(0, height)
    axes.axis("off")
    for at, column in enumerate(columns):
        for number, box in enumerate(column):
            box.x = _GAP_X + at * (_WIDE + _GAP_X)
            box.y = height - (number + 1) * (_HIGH + _GAP_Y)
    # One arrow for each box is enough to follow the chain back to the ranks at fault.
    for at, column in enumerate(columns):
        for box in column:
            earlier = columns[at - 1] if at else column
            other = next((one for one in earlier if one is not box and box.on & one.ranks), None)
            if other is not None:
                _arrow(axes, box, other)
            _draw(axes, box)
    return figure


def _title(seen: Inspection, found: Diagnosis) -> str:
    if not found.causes:
        return f"{len(seen.ranks)} ranks: nobody is at fault"
    first = found.causes[0]
    who = Who(seen).title(first.guilty)
    waiting = f"{len(first.delayed)} of {len(seen.places) or len(seen.ranks)} ranks wait because of it"
    return f"{capitalised(who)}: {first.kind}; {waiting}"


def _columns(seen: Inspection, found: Diagnosis) -> list[list[_Box]]:
    """Return the boxes in columns: those at fault, those that wait for them, those that wait for these, and so on.

    Ranks of one column that wait in the same kind of operation are one box.
    """
    waits: dict[int, list[Wait]] = defaultdict(list)
    for wait in found.waiting:
        for rank in wait.ranks:
            waits[rank].append(wait)
    who = Who(seen)
    guilty = {rank for cause in found.causes for rank in cause.guilty}
    columns = [[_at_fault(who, cause, _awaited(waits[cause.rank])) for cause in found.causes]]
    left, before = waits.keys() - guilty, guilty
    while left:
        ranks = {rank for wait in found.waiting if not before.isdisjoint(wait.on) for rank in wait.ranks} & left or left
        if len(columns) == _MOST_COLUMNS - 1:
            ranks = left
        columns.append(_merged(who, ranks, waits))
        left, before = left - ranks, ranks
    return [_cut(who, column) for column in columns if column]


def _awaited(waits: Iterable[Wait]) -> set[int]:
    return {rank for wait in waits for rank in wait.on}


def _at_fault(who: Who, cause: Cause, on: set[int]) -> _Box:
    ranks = set(cause.guilty)
    return _Box(ranks, f"{who.title(ranks)}: {cause.kind}", cause.where, on, at_fault=True)


def _merged(who: Who, ranks: set[int], waits: Mapping[int, list[Wait]]) -> list[_Box]:
    classes: dict[tuple[str, str], list[int]] = defaultdict(list)
    for rank in sorted(ranks):
        operation = waits[rank][0].operation
        classes[operation.name, operation.group.rpartition("/")[0] or operation.group].append(rank)
    boxes = []
    for (name, kind), members in classes.items():
        first = [waits[rank][0].operation for rank in members]
        groups = sorted({operation.group for operation in first})
        where = who.operation(first[0]) if len(members) == 1 else f"{name} of {_groups(kind, groups)}"
        awaited = _awaited({wait.number: wait for rank in members for wait in waits[rank]}.values())
        boxes.append(_Box(set(members), who.title(members), f"in {where}", awaited))
    return boxes


def _groups(kind: str, groups: list[str]) -> str:
    return f"group {groups[0]}" if len(groups) == 1 else f"{len(groups)} groups {kind}"


def _cut(who: Who, column: list[_Box]) -> list[_Box]:
    """Return at most ``_MOST_BOXES`` boxes; the last one stands for all further ones."""
    if len(column) <= _MOST_BOXES:
        return column
    rest = column[_MOST_BOXES - 1 :]
    ranks = {rank for box in rest for rank in box.ranks}
    on = {rank for box in rest for rank in box.on}
    more = _Box(ranks, f"{len(ranks)} further ranks", who.listed(ranks), on, at_fault=rest[0].at_fault)
    return [*column[: _MOST_BOXES - 1], more]


def _draw(axes, box: _Box) -> None:
    edge = palette.FAULT if box.at_fault else palette.QUIET
    shape = "round,pad=0.02,rounding_size=0.06"
    face = "#fbe9e7" if box.at_fault else palette.PAPER
    axes.add_patch(FancyBboxPatch((box.x, box.y), _WIDE, _HIGH, boxstyle=shape, ec=edge, fc=face, lw=1.4, zorder=3))
    color = palette.FAULT if box.at_fault else palette.INK
    place = {"ha": "left", "va": "top", "zorder": 4}
    title = textwrap.shorten(box.title, _CHARACTERS - 4, placeholder=" ...")
    axes.text(box.x + 0.08, box.y + _HIGH - 0.08, title, fontsize=9, weight="bold", color=color, **place)
    lines = textwrap.wrap(box.text.replace("/", "/\u200b"), _CHARACTERS + 6)
    text = "\n".join(line.replace("\u200b", "") for line in [*lines[:3], *(["..."] if len(lines) > 3 else [])])
    axes.text(box.x + 0.08, box.y + _HIGH - 0.32, text, fontsize=7, color=palette.QUIET, **place)


def _arrow(axes, box: _Box, other: _Box) -> None:
    """Draw an arrow from a box to the box that it waits for."""
    same = abs(box.x - other.x) < 0.01
    start = (box.x, box.y + _HIGH / 2)
    end = (other.x, other.y + _HIGH / 2) if same else (other.x + _WIDE, other.y + _HIGH / 2)
    bend = "arc3,rad=0.5" if same else "arc3,rad=0.08"
    style = {
        "arrowstyle": "-|>",
        "color": palette.QUIET,
        "lw": 1.0,
        "connectionstyle": bend,
        "shrinkA": 1,
        "shrinkB": 3,
    }
    axes.annotate("", xy=end, xytext=start, arrowprops=style, zorder=2)
