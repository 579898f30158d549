"""``ft plan disruption``."""

import argparse


def add_parser(subparsers) -> None:
    """Adds the subcommand."""
    parser = subparsers.add_parser("disruption", help="what failures cost: hot-swap beside restarts from checkpoints")
    parser.set_defaults(main=run)


def run(arguments: argparse.Namespace) -> int:
    """Prints the comparison."""
    return 0
