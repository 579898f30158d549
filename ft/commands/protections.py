"""Define ``ft protections``, the table of protections, and ``ft dmr``, which plans and tests double execution."""

import argparse

from ft.base.flags import add_group
from ft.protection import table


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the subcommand ``protections`` to the command ``ft``."""
    about = "list the protections of a run: their order, the flags that enable them, and which cannot be combined"
    parser = subparsers.add_parser("protections", help=about, description=f"{about.capitalize()}.")
    parser.set_defaults(main=main)


def main(given: argparse.Namespace) -> int:
    """Print the table of protections; return 0."""
    print(table.text(), end="")
    return 0


_DMR = (
    "ft.systems.dmr.command",
    "ft.lab.estimate.command",
    "ft.lab.reproducibility.command",
)
"""Modules with an ``add_parser`` function each, in the order in which the help text lists their subcommands."""

_DMR_DESCRIPTION = """\
DMR (SpareTrain) executes every operator twice and compares the results, which detects silent data corruption. A plan
says when each operator is executed the second time: with the recomputation of activation checkpointing, in a window in
which the device is idle, or at once."""


def add_dmr(subparsers) -> None:
    """Add ``dmr`` with its subcommands."""
    about = "plan double execution of operators (DMR), and estimate what it costs"
    add_group(subparsers, "dmr", _DMR, help=about, description=_DMR_DESCRIPTION)
