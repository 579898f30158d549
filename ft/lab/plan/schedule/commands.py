"""Implement ``ft plan schedule``: plan, check, compare and draw pipeline schedules.

Besides 1F1B and interleaved 1F1B there are schedules for CheckFree+, in which some microbatches pass the first two and
the last two stages in swapped order.
"""

import argparse
import json
from pathlib import Path

from ft.base.errors import UserError
from ft.base.quantities import argument, between
from ft.lab.plan.schedule.file import as_values as program_values
from ft.lab.plan.schedule.file import write
from ft.lab.plan.schedule.table import as_text, as_values, predicted
from ft.systems.schedule.choose import BEST, KINDS, Planned, Shape, best, compared, plan

_DESCRIPTION = """\
Plan the order in which each pipeline stage runs the forwards and backwards of its microbatches, compute the bubbles,
and check that the schedule can run: inputs arrive in time, every pair of stages receives messages in the order in which
they are sent (NCCL has no tags), nothing deadlocks if sends wait for their receivers, and memory suffices.

1f1b, interleaved   megatron-core's schedules without swapped microbatches, for comparison
two-pass            normal microbatches, a flush, and those with the first two and the last two stages swapped
half-half           the same without the flush: each stage starts as soon as it can, and holds no more than in 1F1B
woven               normal and swapped in turn, so that no stage waits once all have begun: holds two more
alternate           1F1B's order with every second microbatch swapped: invalid, because messages cross
best                the cheapest valid schedule (CheckFree+)"""


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
    parser.add_argument(
        "--microbatches", type=int, required=True, metavar="M", help="number of microbatches of one iteration"
    )
    parser.add_argument("--kind", choices=(*KINDS, BEST), default=BEST, help=f"default: {BEST}")
    parser.add_argument(
        "--forward", type=_NUMBER, default=1.0, metavar="X", help="time of a stage's forward; default: 1"
    )
    parser.add_argument(
        "--backward",
        type=_NUMBER,
        metavar="X",
        help="time of a stage's backward, in the same unit; default: twice the forward",
    )
    parser.add_argument("--comm", type=_NUMBER, default=0.0, metavar="X", help="of a message; default: 0")
    parser.add_argument(
        "--chunks",
        type=int,
        default=2,
        metavar="N",
        help="number of model chunks per stage for interleaved; default: 2",
    )
    most = "number of microbatches whose activations a stage may hold; default: no limit"
    parser.add_argument("--most-in-flight", type=int, metavar="N", help=most)
    parser.add_argument("--out", metavar="FILE", help="write the steps of every stage to this file, as JSON")
    parser.add_argument("--plot", metavar="FILE", help="write a picture of the stages over time to this file, as PNG")
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
