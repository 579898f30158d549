"""The command ``ft``: each subcommand lives with the system it belongs to."""

import argparse
import importlib
import sys

from ft.errors import UserError

_SUBCOMMANDS = (
    ("ft.agent.run", "add_parser"),
    ("ft.report.commands", "add_parsers"),
    ("ft.inject.commands", "add_parser"),
    ("ft.plan.commands", "add_parser"),
    ("ft.simulate.commands", "add_parser"),
)


def main(argv: list[str] | None = None) -> int:
    """Runs one subcommand; returns the exit code: its own, 2 where the input cannot work."""
    parser = argparse.ArgumentParser(
        prog="ft",
        description="Training that goes on through faults: starts runs, shows them, and reports on them.",
        epilog="ft SUBCOMMAND --help tells about each.",
    )
    subparsers = parser.add_subparsers(title="subcommands", metavar="SUBCOMMAND", required=True)
    for module, function in _SUBCOMMANDS:
        getattr(importlib.import_module(module), function)(subparsers)
    argv = sys.argv[1:] if argv is None else argv
    if not argv:
        parser.print_help()
        return 2
    given = parser.parse_args(argv)
    try:
        return given.main(given)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
