"""Implement ``ft plan``: planning tools for recovery, snapshots, pipeline schedules and redundancy of training data.

There is one subcommand for each question.
"""

import argparse
import importlib
import importlib.util

from ft.base.errors import UserError

_SUBCOMMANDS = (
    "ft.lab.plan.disruption.commands",
    "ft.lab.plan.snapshot.commands",
    "ft.lab.plan.policy.commands",
    "ft.lab.plan.schedule.commands",
    "ft.lab.plan.spare.commands",
)


def add_parser(subparsers) -> None:
    """Add ``plan`` with its subcommands; each of them sets the parser default ``main``, a function that runs it."""
    parser = subparsers.add_parser(
        "plan", help="plan recovery, snapshots, pipeline schedules and redundancy before a run"
    )
    parser.set_defaults(main=_ask)
    questions = parser.add_subparsers(title="subcommands", metavar="SUBCOMMAND")
    for name in _SUBCOMMANDS:
        if importlib.util.find_spec(name.rpartition(".")[0]) is not None:
            importlib.import_module(name).add_parser(questions)


def _ask(arguments: argparse.Namespace) -> int:
    raise UserError("ft plan answers several questions, and none was asked", "see ft plan --help for its subcommands")
