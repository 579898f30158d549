"""Define the command ``ft dmr`` and its subcommands, which plan, explain, estimate and test double execution.

DMR (dual modular redundancy, from the SpareTrain paper) executes every operator twice and compares the results, in
order to detect silent data corruption.
"""

import argparse
import importlib

from ft.base.errors import UserError

_SUBCOMMANDS = (
    *("ft.systems.dmr.profile.command", "ft.systems.dmr.plan.command", "ft.systems.dmr.plan.explain"),
    "ft.lab.estimate.command",
    "ft.lab.selftest.command",
)
"""Modules with an ``add_parser`` function each, in the order in which the help text lists their subcommands."""

_DESCRIPTION = """\
DMR (SpareTrain) executes every operator twice and compares the results, which detects silent data corruption. A plan
says when each operator is executed the second time: with the recomputation of activation checkpointing, in a window in
which the device is idle, or at once."""


def add_parser(subparsers) -> None:
    """Add ``dmr`` with its subcommands.

    Each subcommand sets the parser default ``main``, a function that runs the subcommand with the parsed arguments.
    """
    parser = subparsers.add_parser(
        "dmr",
        help="plan double execution of operators (DMR), and estimate what it costs",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(main=_ask)
    questions = parser.add_subparsers(title="subcommands", metavar="SUBCOMMAND")
    for name in _SUBCOMMANDS:
        importlib.import_module(name).add_parser(questions)


def _ask(arguments: argparse.Namespace) -> int:
    raise UserError("ft dmr answers several questions, and none was asked", "see ft dmr --help")
