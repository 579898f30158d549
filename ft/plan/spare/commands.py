"""``ft plan spare``: one subcommand for each question about SPARe."""

import argparse

from ft.errors import UserError
from ft.plan.spare import cross_check, optimize, simulate


def add_parser(questions) -> None:
    """Adds ``spare``; each of its subcommands sets ``main`` as all of ``ft`` do."""
    parser = questions.add_parser("spare", help="SPARe: how long a run takes with it, and with which redundancy")
    parser.set_defaults(main=_ask)
    subparsers = parser.add_subparsers(title="subcommands", metavar="SUBCOMMAND")
    for module in (optimize, simulate, cross_check):
        module.add_parser(subparsers)


def _ask(arguments: argparse.Namespace) -> int:
    raise UserError("ft plan spare answers several questions, and none was asked", "see ft plan spare --help")
