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
from ft.lab.plan.schedule.file import as_values as program_values
from ft.lab.plan.schedule.file import write
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
        ("--out", "FILE", str, None, "write the steps of every stage to this file, as JSON"),
        ("--plot", "FILE", str, None, "write a picture of the stages over time to this file, as PNG"),
    ):
        parser.add_argument(name, metavar=metavar, type=kind, default=default, help=about)
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.set_defaults(main=run)


def run(given: argparse.Namespace) -> int:
    """Plan, print, draw and write the schedule.

    Raises:
        UserError: the schedule does not exist, is invalid, or a file cannot be written.
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
    if given.out is not None:
        values = program_values(found.program, found.kind)
        write(values | {"predicted": predicted(found)}, Path(given.out))
    return 0


def _draw(found: Planned, path: Path) -> None:
    # Import the picture module here: importing matplotlib takes longer than everything else in this command.
    from ft.lab.plan.schedule.picture import draw

    try:
        draw(found, path)
    except (OSError, ValueError) as error:
        raise UserError(f"the picture cannot be written: {error}", "give --plot a path ending in .png") from error


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


def predicted(found: Planned) -> dict[str, Any]:
    """Return the given times and the cost that is predicted for them.

    A schedule file stores this in addition to the program, which is the order of each stage's units and messages.
    """
    given = {"forward": found.shape.f, "backward": found.shape.b, "comm": found.shape.comm}
    return given | {name: value for name, value in _summary(found).items() if name not in ("kind", "valid")}


def _summary(found: Planned) -> dict[str, Any]:
    return {
        "kind": found.kind,
        "time": None if found.ran.stuck else found.ran.end,
        "bubbles": found.bubble,
        "in_flight": found.in_flight,
        "valid": found.valid,
    }
