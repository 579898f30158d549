"""Implement the command ``ft dmr explain``: print how a DMR plan file verifies operators, what that costs, and why.

DMR (dual modular redundancy, SpareTrain) verifies operators by executing them a second time, at the time that the plan
says.
"""

import argparse
from pathlib import Path

from ft.base.errors import UserError
from ft.show.text import table
from ft.systems.dmr.plan.assign import Plan
from ft.systems.dmr.plan.command import add_answer_flags, answer
from ft.systems.dmr.plan.file import read_plan

_MOST = 40
"""Maximum number of operators that are listed one by one, the longest first."""


def add_parser(subparsers) -> None:
    """Add the subcommand ``explain`` to ``subparsers``, the argparse subparsers of ``ft dmr``."""
    parser = subparsers.add_parser(
        "explain",
        help="explain how a plan verifies operators, what this costs, and why",
        description="Read a plan, check that it can be followed, and print how it verifies operators and what this "
        "costs.",
    )
    parser.add_argument("plan", metavar="PLAN", help="plan that ft dmr plan --out has written")
    parser.add_argument(
        "--operators", metavar="TEXT", help="list the operators whose name or id contains TEXT, the longest first"
    )
    add_answer_flags(parser)
    parser.set_defaults(main=run)


def run(given: argparse.Namespace) -> int:
    """Print the explanation, and return the exit code.

    Raises:
        UserError: the plan cannot be read or followed, no operator matches, or the picture cannot be written.
    """
    found = read_plan(Path(given.plan))
    if given.operators is not None:
        print(listed(found, given.operators))
        return 0
    answer(found, given)
    return 0


def listed(plan: Plan, text: str) -> str:
    """Return a table of the operators whose name or id contains ``text``, at most _MOST, the longest first.

    Raises:
        UserError: no operator matches.
    """
    ops = [op for op in plan.trace.ops if text in op.name or text in op.id]
    if not ops:
        raise UserError(f"the plan has no operator named like {text!r}", "remove --operators to list all operators")
    ops.sort(key=lambda op: (-op.t_us, op.start_us))
    rows = []
    for op in ops[:_MOST]:
        how, place = plan.assign[op.id], op.place
        where = (str(place.stage), str(place.microbatch), str(place.layer), place.phase)
        rows.append((op.id, op.name, *where, f"{op.t_us:.1f}", how.set, how.agc_segment or how.window or "-"))
    head = ("operator", "name", "stage", "microbatch", "layer", "phase", "us", "set", "window or segment")
    more = [f"and {len(ops) - _MOST} more"] if len(ops) > _MOST else []
    return "\n".join([table(head, rows, (2, 3, 4, 6)), *more])
