"""Define the command ``ft protections``: the table of protections, their order, flags and contradictions."""

import argparse

from ft.protection import table


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the subcommand ``protections`` to the command ``ft``."""
    about = "list the protections of a run: their order, the flags that enable them, and which cannot be combined"
    parser = subparsers.add_parser("protections", help=about, description=f"Print the {about}.")
    parser.set_defaults(main=main)


def main(given: argparse.Namespace) -> int:
    """Print the table of protections; return 0."""
    print(table.text(), end="")
    return 0
