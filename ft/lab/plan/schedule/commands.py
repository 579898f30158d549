"""Implement ``ft plan schedule``: plan, check, compare and draw pipeline schedules.

Besides 1F1B and interleaved 1F1B there are schedules for CheckFree+, in which some microbatches pass the first two and
the last two stages in swapped order.
"""

import argparse
import json
from pathlib import Path

from ft.base.errors import UserError
from ft.base.quantities import argument, between
from ft.lab.plan.schedule.table import as_text, as_values, predicted
from ft.systems.schedule.choose import BEST, KINDS, Planned, Shape, best, compared, plan
from ft.systems.schedule.file import as_values as program_values
from ft.systems.schedule.file import write

_DESCRIPTION = """\
The order in which each pipeline stage runs the forwards and backwards of its microbatches, the bubbles it leaves, and
whether it may run: each input there in time, messages of every pair of stages received as they are sent (NCCL has no
tags), no deadlock with sends that wait for their receivers, memory.

1f1b, interleaved   megatron-core's, nothing swapped: to compare with
two-pass            normal microbatches, a flush, and those with the first two and the last two stages swapped
half-half           the same without the flush, each stage as soon as it can: none holds more than 1F1B's first
woven               normal and swapped in turn, so that no stage waits once all have begun: holds two more
alternate           1F1B's order with every second microbatch swapped: refused, because messages cross
best                the cheapest of those that may run (CheckFree+)"""


_MOST_UNITS = 100_000
_NUMBER = argument(between(0.0, 1e12))


def add_parser(questions) -> None:
    """Add the subcommand."""
    parser = questions.add_parser(
        "schedule",
        help="order per stage, bubbles and message order of pipeline schedules, those of CheckFree+ too",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--pp", type=int, required=True, metavar="P", help="pipeline stages")
    parser.add_argument("--microbatches", type=int, required=True, metavar="M", help="of one iteration")
    parser.add_argument("--kind", choices=(*KINDS, BEST), default=BEST, help=f"default: {BEST}")
    parser.add_argument(
        "--forward", type=_NUMBER, default=1.0, metavar="X", help="time of a stage's forward; default: 1"
    )
    parser.add_argument(
        "--backward", type=_NUMBER, metavar="X", help="of its backward, in the same unit; default: twice the forward"
    )
    parser.add_argument("--comm", type=_NUMBER, default=0.0, metavar="X", help="of a message; default: 0")
    parser.add_argument("--chunks", type=int, default=2, metavar="N", help="model chunks of interleaved; default: 2")
    most = "microbatches whose activations a stage may hold; default: as many as it takes"
    parser.add_argument("--most-in-flight", type=int, metavar="N", help=most)
    parser.add_argument("--out", metavar="FILE", help="where to write the steps of every stage, JSON")
    parser.add_argument("--plot", metavar="FILE", help="a picture of the stages over time, PNG")
    parser.add_argument("--json", action="store_true", help="JSON instead of tables")
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
            f"give up to {_MOST_UNITS:,} of them",
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
        raise UserError(f"the schedule {found.kind} may not run: {fault}", f"take --kind {BEST}")
