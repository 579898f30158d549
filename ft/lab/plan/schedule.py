"""Implement ``ft plan schedule``: plan, check, compare and draw pipeline schedules.

Besides 1F1B and interleaved 1F1B there are schedules for CheckFree+, in which some microbatches pass the first two and
the last two stages in swapped order. A unit is the forward or backward of one microbatch on one pipeline stage.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ft.base.errors import UserError
from ft.base.quantities import argument, between
from ft.show import palette
from ft.show.text import left_out, percent, shortened, table
from ft.systems.schedule.check import named
from ft.systems.schedule.choose import BEST, KINDS, Planned, Shape, best, compared, plan
from ft.systems.schedule.program import Unit, straight

_DESCRIPTION = """\
Plan the order in which each pipeline stage runs the forwards and backwards of its microbatches, compute the bubbles,
and check that the schedule can run: inputs arrive in time, every pair of stages receives messages in the order in which
they are sent (NCCL has no tags), nothing deadlocks if sends wait for their receivers, and memory suffices.

1f1b, interleaved   megatron-core's schedules without swapped microbatches, for comparison
half-half           normal microbatches, then those with the first two and the last two stages swapped: each stage
                    starts as soon as it can, and holds no more than in 1F1B
woven               normal and swapped in turn, so that no stage waits once all have begun: holds two more
best                the cheapest valid schedule (CheckFree+)"""

LEFT_OUT = left_out(
    "unlike stages",
    "gradient reduction and optimizer",
    "NCCL that starts the messages of a batch in turn",
)
_WIDTH = 120
_MOST_FAULTS = 4
_COLOURS = {
    (False, False): ("#8fb3d9", "forward"),
    (False, True): ("#4f7fb0", "backward"),
    (True, False): ("#e9c486", "swapped forward"),
    (True, True): ("#b07d2a", "swapped backward"),
}
"""(Whether a unit is swapped, whether it is a backward) -> its colour and name in the picture."""
_LANE = 0.84
_NUMBERED = 340
"""Largest length of a schedule, in durations of its shortest unit, at which the microbatches' numbers are readable."""
_MOST_UNITS = 100_000
_NUMBER = argument(between(0.0, 1e12))


def add_parser(subparsers) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "schedule",
        help="plan and check pipeline schedules, including those of CheckFree+",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--pp", type=int, required=True, metavar="P", help="pipeline stages")
    about = "number of microbatches of one iteration"
    parser.add_argument("--microbatches", type=int, required=True, metavar="M", help=about)
    parser.add_argument("--kind", choices=(*KINDS, BEST), default=BEST, help=f"default: {BEST}")
    for name, metavar, kind, default, about in (
        ("--forward", "X", _NUMBER, 1.0, "time of a stage's forward; default: 1"),
        ("--backward", "X", _NUMBER, None, "time of a stage's backward, in the same unit; default: twice the forward"),
        ("--comm", "X", _NUMBER, 0.0, "of a message; default: 0"),
        ("--chunks", "N", int, 2, "number of model chunks per stage for interleaved; default: 2"),
        ("--most-in-flight", "N", int, None, "microbatches whose activations a stage may hold; default: no limit"),
        ("--plot", "FILE", str, None, "draw the stages over time: a file ending in .png, .svg or .pdf"),
    ):
        parser.add_argument(name, metavar=metavar, type=kind, default=default, help=about)
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.set_defaults(main=run)


def run(given: argparse.Namespace) -> int:
    """Plan, print, draw and write the schedule.

    Raises:
        UserError: the schedule does not exist, is invalid, or the picture cannot be written.
    """
    units = given.pp * given.microbatches * max(1, given.chunks)
    if units > _MOST_UNITS:
        raise UserError(
            f"{given.pp} stages with {given.microbatches} microbatches in {given.chunks} chunks are {units:,} units",
            f"give sizes with at most {_MOST_UNITS:,} units",
        )
    backward = 2 * given.forward if given.backward is None else given.backward
    shape = Shape(given.pp, given.microbatches, given.forward, backward, given.comm, given.chunks, given.most_in_flight)
    others = compared(shape) if given.kind == BEST else []
    found = best(others) if others else plan(given.kind, shape)
    beside = [plan("1f1b", shape), *others]
    print(json.dumps(as_values(found, beside)) if given.json else as_text(found, beside))
    if given.plot is not None:
        _draw(found, Path(given.plot))
    _refuse(found)
    return 0


def _draw(found: Planned, path: Path) -> None:
    """Draw the units that each stage runs over time.

    Raises:
        UserError: the file cannot be written.
    """
    from matplotlib.patches import Patch  # its import takes longer than everything else here

    from ft.show import axes as plot

    shape = found.shape
    title = f"{found.kind}: {shape.stages} stages, {shape.microbatches} microbatches"
    title += ", never ends" if found.bubble is None else f", {percent(found.bubble)} bubbles"
    figure, axes = plot.rows(title, (0.34 * shape.stages + 0.6,))
    plot.plain(axes, "units of each stage with the numbers of their microbatches; white is idle time", pad=22)
    normal, ways = straight(shape.stages, found.chunks), found.program.routes.ways
    end = max((end for _, end in found.ran.times.values()), default=1.0)
    numbered = end * found.chunks / min(shape.f, shape.b) <= _NUMBERED
    for unit, (start, stop) in found.ran.times.items():
        colour, lane = _COLOURS[ways[unit.microbatch] != normal, unit.backward][0], (unit.stage - _LANE / 2, _LANE)
        axes.broken_barh([(start, stop - start)], lane, facecolors=colour, edgecolor=palette.PAPER, linewidth=0.5)
        if numbered:
            style = {"ha": "center", "va": "center", "fontsize": 5, "color": palette.INK}
            axes.text((start + stop) / 2, unit.stage, str(unit.microbatch), **style)
    axes.set_xlim(0, end)
    axes.set_yticks(range(shape.stages), [f"stage {stage}" for stage in range(shape.stages)])
    axes.invert_yaxis()
    axes.set_xlabel("time in the unit of --forward", **plot.STYLE)
    seen = {ways[unit.microbatch] != normal for unit in found.ran.times}
    named = [entry for (way, _), entry in _COLOURS.items() if way in seen]
    plot.legend(axes, [Patch(color=colour, label=label) for colour, label in named])
    plot.save(figure, path)


def _refuse(found: Planned) -> None:
    broken = [finding for finding in found.findings if finding.faults]
    if broken:
        fault = "; ".join(f"{finding.rule} ({finding.faults[0]})" for finding in broken)
        raise UserError(f"the schedule {found.kind} cannot run: {fault}", f"take --kind {BEST}")


def as_text(found: Planned, beside: Sequence[Planned]) -> str:
    """Return what is left out, and the schedule's cost, check and order, beside those of other schedules.

    Args:
        found: the schedule.
        beside: schedules to list in the comparison.
    """
    shape = found.shape
    times = f"forward {shape.f:g}, backward {shape.b:g}, message {shape.comm:g}"
    head = f"{found.kind}: {shape.stages} stages, {shape.microbatches} microbatches; {times}"
    parts = [LEFT_OUT, head, _costs(found), _checks(found), _order(found)]
    if any(other.kind != found.kind for other in beside):
        parts.append(_compared(found, beside if found in beside else [*beside, found]))
    return "\n\n".join(parts)


def _costs(found: Planned) -> str:
    ran = found.ran
    if ran.stuck:
        return "the schedule deadlocks"
    held = ", ".join(f"{each:g}" for each in found.in_flight)
    return f"time {ran.end:g}, bubbles {percent(found.bubble)}\nmicrobatches in flight, by stage: {held}"


def _checks(found: Planned) -> str:
    lines = []
    for rule, faults in found.findings:
        lines.append(f"{'NO' if faults else 'ok':3} {rule}")
        lines += [f"      {shortened(fault, _WIDTH - 6)}" for fault in faults[:_MOST_FAULTS]]
        if len(faults) > _MOST_FAULTS:
            lines.append(f"      and {len(faults) - _MOST_FAULTS} more")
    return "\n".join(lines)


def _order(found: Planned) -> str:
    lines = [
        "order of each stage (F forward, B backward; ': a microbatch that passes the end stages in swapped order):"
    ]
    for stage in range(found.shape.stages):
        units = " ".join(_short(found, unit) for unit in found.program.order(stage))
        lines.append(shortened(f"  {stage}: {units}", _WIDTH))
    return "\n".join(lines)


def _short(found: Planned, unit: Unit) -> str:
    if found.chunks > 1:
        return f"{named(unit._replace(chunk=0))}.{unit.chunk}"
    return named(unit) + ("'" if found.program.routes.ways[unit.microbatch] != straight(found.shape.stages) else "")


def _compared(found: Planned, planned: Sequence[Planned]) -> str:
    rows = [
        (
            each.kind + (" *" if each is found else ""),
            "-" if each.ran.stuck else f"{each.ran.end:g}",
            percent(each.bubble),
            f"{max(each.in_flight):g}",
            "yes" if each.valid else f"no: {next(rule for rule, faults in each.findings if faults)}",
        )
        for each in planned
    ]
    return table(("kind", "time", "bubbles", "in flight", "valid"), rows, right=(1, 2, 3))


def as_values(found: Planned, beside: Sequence[Planned]) -> dict[str, Any]:
    """Return the schedule's cost, check and order as JSON values; times are in the unit in which they were given.

    Args:
        found: the schedule.
        beside: schedules whose costs are listed for comparison.
    """
    program = found.program
    return {
        **_summary(found),
        "stages": found.shape.stages,
        "microbatches": found.shape.microbatches,
        "faults": {rule: list(faults) for rule, faults in found.findings},
        "order": [[_short(found, unit) for unit in program.order(stage)] for stage in range(found.shape.stages)],
        "beside": [_summary(each) for each in beside],
    }


def _summary(found: Planned) -> dict[str, Any]:
    return {
        "kind": found.kind,
        "time": None if found.ran.stuck else found.ran.end,
        "bubbles": found.bubble,
        "in_flight": found.in_flight,
        "valid": found.valid,
    }
