"""Implement ``ft plan disruption``: compare the cost of failures with hot-swap and with restarts from a checkpoint.

In a hot-swap a standby (a warm, idle node) takes over from a failed node, with state from peers' memory.
"""

import argparse
import json
from pathlib import Path

from ft.base.errors import UserError
from ft.lab.plan.disruption.answer import answer
from ft.lab.plan.disruption.flags import add_flags, plan_of
from ft.lab.plan.disruption.table import as_text, as_values

_DESCRIPTION = """\
Compare what failures cost a run with restarts from a checkpoint (at the given interval, and at Young's) and with
hot-swap: per failure, per day, as effective training time, in GPU hours and in money.
Times have a unit (ms, s, m or min, h, d): 45ms, 2.5m, 90d."""


def add_parser(subparsers) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "disruption",
        help="compare the cost of failures with hot-swap and with restarts from checkpoints",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_flags(parser)
    parser.set_defaults(main=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the comparison, and draw a picture of it if the flags ask for one.

    Raises:
        UserError: the flags are inconsistent, or the picture cannot be written.
    """
    plan = plan_of(arguments)
    found = answer(plan)
    print(json.dumps(as_values(plan, found)) if arguments.json else as_text(plan, found))
    if arguments.plot is not None:
        # Import the picture module here: importing matplotlib takes longer than everything else in this command.
        from ft.lab.plan.disruption.picture import draw

        try:
            draw(plan, found, Path(arguments.plot))
        except (OSError, ValueError) as error:
            raise UserError(f"the picture cannot be written: {error}", "give --plot a path ending in .png") from error
    return 0
