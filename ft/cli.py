"""The command ``ft``: each subcommand lives with the system it belongs to."""

import importlib
import os
import select
import signal
import sys

from ft.base.checkout import CHECKOUT
from ft.base.errors import UserError
from ft.base.flags import Parser

_SUBCOMMANDS = (
    (("run",), "ft.commands.run", "add_parser"),
    (("check",), "ft.commands.check", "add_parser"),
    (("status", "report"), "ft.commands.report", "add_parsers"),
    (("protections",), "ft.commands.protections", "add_parser"),
    (("faults",), "ft.faults.commands", "add_parser"),
    (("plan",), "ft.lab.plan.commands", "add_parser"),
    (("dmr",), "ft.commands.dmr", "add_parser"),
    (("diagnose",), "ft.observe.diagnose.commands", "add_parser"),
    (("simulate",), "ft.lab.simulate.commands", "add_parser"),
)
"""(names, module, function). Only the module of the subcommand that is asked for is imported: simulations and planners
bring libraries that a launcher should not wait for."""


def main(argv: list[str] | None = None) -> int:
    """Runs one subcommand; returns the exit code: its own, 2 where the input cannot work."""
    parser = Parser(
        prog="ft",
        description="Training that goes on through faults: starts runs, shows them, and reports on them.",
        epilog="ft SUBCOMMAND --help tells about each.",
    )
    subparsers = parser.add_subparsers(title="subcommands", metavar="SUBCOMMAND", required=True)
    argv = sys.argv[1:] if argv is None else argv
    _prefer_this_checkout()
    asked_for = [entry for entry in _SUBCOMMANDS if argv and argv[0] in entry[0]]
    for _, module, function in asked_for or _SUBCOMMANDS:
        getattr(importlib.import_module(module), function)(subparsers)
    if not argv:
        parser.print_help()
        return 2
    try:
        given = parser.parse_args(argv)
        code = given.main(given)
        sys.stdout.flush()
        return code
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        if not _nobody_reads():
            raise
        return 128 + signal.SIGPIPE


def _prefer_this_checkout() -> None:
    """Put the folder that holds this ``ft`` first on the import path.

    The wheel of megatron-core contains a ``megatron.training`` of its own from 0.19 on. The console script ``ft`` would
    import that one, because its own folder is first on the path and not the checkout.
    """
    if str(CHECKOUT) not in sys.path[:1]:
        sys.path.insert(0, str(CHECKOUT))


def _nobody_reads() -> bool:
    """Whoever reads the output has seen enough, as ``head`` has; another broken pipe is no such thing."""
    output = sys.stdout.fileno()
    watch = select.poll()
    watch.register(output, 0)
    if not any(event & select.POLLERR for _, event in watch.poll(0)):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), output)  # at exit Python flushes once more
    return True
