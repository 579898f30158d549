"""``ft protections``: which protections there are, in which order they wrap a step, and which do not go together."""

import argparse

from ft.protection import table


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the subcommand."""
    about = "protections of a run: their order, what asks for each, and which do not go together"
    parser = subparsers.add_parser("protections", help=about, description=f"Print the {about}.")
    parser.set_defaults(main=main)


def main(given: argparse.Namespace) -> int:
    """Print the table of protections; return 0."""
    print(table.text(), end="")
    return 0
