"""``ft dmr``: one subcommand for each question about DMR."""

import argparse
import importlib

from ft.errors import UserError

_SUBCOMMANDS = ("ft.dmr.estimate.commands",)
"""Modules with an ``add_parser`` each, in the order in which help shows them."""


def add_parser(subparsers) -> None:
    """Adds ``dmr`` with its subcommands; each of them sets ``main`` as all of ``ft`` do."""
    parser = subparsers.add_parser(
        "dmr",
        help="every operator executed twice and compared: what it costs, and how it is planned",
        description="DMR (SpareTrain): every operator is executed twice and compared, in time that a run leaves idle.",
    )
    parser.set_defaults(main=_ask)
    questions = parser.add_subparsers(title="subcommands", metavar="SUBCOMMAND")
    for name in _SUBCOMMANDS:
        importlib.import_module(name).add_parser(questions)


def _ask(arguments: argparse.Namespace) -> int:
    raise UserError("ft dmr has several subcommands, and none was given", "see ft dmr --help")
