"""Define the commands ``ft status RUN`` and ``ft report RUN``, which show the state and history of a run."""

import argparse
import json
import sys
import time

from ft.base.errors import UserError
from ft.base.files import replace_all
from ft.observe.report.record import load
from ft.observe.report.status import as_text, now
from ft.show.text import steer

NOT_CLEAN = 1
"""Exit code of a report of several replicas whose audit does not prove that every sample was trained exactly once."""

_WATCH_S = 1.0
_CLEAR = "\x1b[H\x1b[2J"


def add_parsers(subparsers) -> None:
    """Add both subcommands.

    Each subcommand sets the parser default ``main``, a function that takes the parsed arguments and returns the exit
    code.
    """
    parser = subparsers.add_parser("status", help="show the workers of a run, its step and its epoch")
    _run_argument(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.add_argument("--watch", action="store_true", help="print the status again every second until the run ends")
    parser.set_defaults(main=run_status)
    parser = subparsers.add_parser("report", help="write report.html and timeline.png for a run")
    _run_argument(parser)
    parser.set_defaults(main=run_report)


def run_status(arguments: argparse.Namespace) -> int:
    """Print the state of a run.

    Returns:
        0, or 1 if the run has not ended and no process that directs it is running.

    Raises:
        UserError: there is no such run.
    """
    try:
        while True:
            found, folder = now(arguments.folder)
            text = json.dumps(found) if arguments.json else as_text(found, folder)
            if arguments.watch and sys.stdout.isatty():
                steer(sys.stdout, _CLEAR)
            print(text, flush=True)
            if found["gone"]:
                return 1
            if not arguments.watch or found["ended"]:
                return 0
            time.sleep(_WATCH_S)
    except KeyboardInterrupt:
        return 0


def run_report(arguments: argparse.Namespace) -> int:
    """Write ``timeline.png`` and ``report.html`` into the run's folder, and print their paths and a summary.

    Returns:
        0, or ``NOT_CLEAN``.

    Raises:
        UserError: there is no such run, or its folder cannot be written; the summary has been printed all the same.
    """
    # Matplotlib takes longer to import than everything else that the command line does.
    from ft.observe.report.page import page
    from ft.observe.report.text import summary
    from ft.observe.report.timeline import draw

    record = load(arguments.folder)
    picture = draw(record)
    pages = {record.folder / "timeline.png": picture, record.folder / "report.html": page(record, picture)}
    written, problem = replace_all(pages)
    print(summary(record, written))
    if problem:
        raise UserError(problem, "make room there, or make the folder writable")
    return 0 if record.audit.is_clean else NOT_CLEAN


def _run_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="RUN", help="the folder that was given to ft run as --run-dir")
