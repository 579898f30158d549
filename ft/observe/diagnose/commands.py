"""Implement ``ft diagnose``, which locates errors in runs; its subcommand ``compare`` compares runs' checkpoints."""

import argparse
import importlib

from ft.base.errors import UserError

_SUBCOMMANDS = ("ft.observe.diagnose.command",)
"""Modules with an ``add_parser`` function each, in the order in which help lists them."""


def add_parser(subparsers) -> None:
    """Add ``diagnose`` with its subcommands; each of them sets the parser default ``main``, a function that runs it."""
    parser = subparsers.add_parser(
        "diagnose",
        help="find where runs of the same training start to differ: step, parameter, rank",
        description="Find the cause of differences between runs that should be equal.",
    )
    parser.set_defaults(main=_ask)
    questions = parser.add_subparsers(title="subcommands", metavar="SUBCOMMAND")
    for name in _SUBCOMMANDS:
        importlib.import_module(name).add_parser(questions)


def _ask(arguments: argparse.Namespace) -> int:
    raise UserError("ft diagnose answers several questions, and none was asked", "see ft diagnose --help")
