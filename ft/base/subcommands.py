"""Commands of ``ft`` that consist of subcommands, each defined in a module of its own."""

import argparse
import importlib
import importlib.util
from collections.abc import Sequence
from typing import Any

from ft.base.errors import UserError


def add_group(subparsers, name: str, modules: Sequence[str], command: str = "ft", **options: str) -> Any:
    """Add the command ``name`` with the subcommands that ``modules`` define.

    Each subcommand sets the parser default ``main``, a function that runs it with the parsed arguments. The command
    alone raises :class:`UserError`.

    Args:
        modules: modules with a function ``add_parser(subparsers)``, in the order in which the help lists them. Modules
            whose package is not installed are skipped.
        command: the command to which the new one belongs.
        options: keyword arguments of the new argparse parser, such as ``help`` and ``description``.

    Returns:
        The argparse subparsers of the new command, for further subcommands.
    """
    parser = subparsers.add_parser(name, formatter_class=argparse.RawDescriptionHelpFormatter, **options)

    def refuse(_arguments: argparse.Namespace) -> int:
        raise UserError(f"{command} {name} needs a subcommand", f"see {command} {name} --help")

    parser.set_defaults(main=refuse)
    nested = parser.add_subparsers(title="subcommands", metavar="SUBCOMMAND")
    for module in modules:
        if importlib.util.find_spec(module.rpartition(".")[0]) is not None:
            importlib.import_module(module).add_parser(nested)
    return nested
