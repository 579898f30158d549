"""The command ``ft``. Each subcommand is defined in the package that implements it."""

import contextlib
import importlib
import os
import select
import signal
import sys

from ft.base.errors import UserError
from ft.base.flags import Parser
from ft.show.text import Plain

_SUBCOMMANDS = (
    (("run",), "ft.commands.run", "add_parser"),
    (("check",), "ft.commands.check", "add_parser"),
    (("selftest",), "ft.commands.selftest", "add_parser"),
    (("health",), "ft.commands.health", "add_parser"),
    (("status", "report"), "ft.commands.report", "add_parsers"),
    (("protections",), "ft.commands.protections", "add_parser"),
    (("faults",), "ft.faults.page", "add_parser"),
    (("plan",), "ft.lab.plan.commands", "add_parser"),
    (("dmr",), "ft.commands.protections", "add_dmr"),
    (("diagnose",), "ft.observe.diagnose.commands", "add_parser"),
)
"""(names, module, function). Only the module of the requested subcommand is imported, because simulations and planners
import libraries that would delay the start of a run."""


def main(argv: list[str] | None = None) -> int:
    """Run one subcommand and return its exit code, which is 2 if the input is invalid."""
    parser = Parser(
        prog="ft",
        description="Start fault-tolerant training runs, show their state, report on them, and plan for failures.",
        epilog="Run ft SUBCOMMAND --help for the flags of a subcommand.",
    )
    subparsers = parser.add_subparsers(title="subcommands", metavar="SUBCOMMAND", required=True)
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["run"]:  # the output of workers is shown as it is
        return _run(parser, subparsers, argv)
    with contextlib.redirect_stdout(Plain(sys.stdout)), contextlib.redirect_stderr(Plain(sys.stderr)):
        return _run(parser, subparsers, argv)


def _run(parser: Parser, subparsers, argv: list[str]) -> int:
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
    except OSError as error:
        if error.filename is None or argv[0] == "run":
            raise
        print(f"error: {str(error.filename)[:200]}: {error.strerror}", file=sys.stderr)  # a file that the flags name
        return UserError.exit_code


def _nobody_reads() -> bool:
    """Return whether the reader of the standard output has closed it, as ``head`` does.

    Any other broken pipe is an error.
    """
    output = sys.stdout.fileno()
    watch = select.poll()
    watch.register(output, 0)
    if not any(event & select.POLLERR for _, event in watch.poll(0)):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), output)  # Python flushes the output once more at exit
    return True
