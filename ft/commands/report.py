"""Define the commands ``ft status RUN`` and ``ft report RUN``, which show the current state and the history of a run.

Both read only the files in the run's folder. They accept ordinary runs, and FT-HSDP runs, in which several replicas
(full copies of the model, each with its own workers) train together.
"""

import argparse
import json
import sys
import time
from typing import Any

from ft.base.errors import UserError
from ft.base.files import replace_all
from ft.observe.hsdp import commands as hsdp
from ft.observe.hsdp.record import is_hsdp
from ft.observe.report.presence import gone
from ft.observe.report.status import as_text, as_values, status
from ft.record.recoveries import recoveries
from ft.record.run import Run, load

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
        0, or 1 if the run has not ended and no control plane (the process that directs recoveries) is running.

    Raises:
        UserError: there is no such run.
    """
    try:
        while True:
            text, values, ended = _now(arguments.folder)
            text = json.dumps(values) if arguments.json else text
            print(_CLEAR + text if arguments.watch and sys.stdout.isatty() else text, flush=True)
            if values["gone"]:
                return 1
            if not arguments.watch or ended:
                return 0
            time.sleep(_WATCH_S)
    except KeyboardInterrupt:
        return 0


def run_report(arguments: argparse.Namespace) -> int:
    """Write ``timeline.png`` and ``report.html`` into the run's folder, and print their paths and a summary.

    Returns:
        0, or 1 for a run of several replicas if it is not proven that each sample was trained exactly once.

    Raises:
        UserError: there is no such run, or its folder cannot be written; the summary has been printed all the same.
    """
    if is_hsdp(arguments.folder):
        text, problem, code = hsdp.write_report(arguments.folder)
    else:
        (text, problem), code = write_report(load(arguments.folder)), 0
    print(text)
    if problem:
        raise UserError(problem, "make room there, or make the folder writable")
    return code


def write_report(run: Run) -> tuple[str, str]:
    """Write ``timeline.png`` and ``report.html`` into the run's folder.

    Returns:
        (a summary for the terminal, with the paths of the files; why a file could not be written, or "").
    """
    # Matplotlib takes longer to import than everything else that the command line does.
    from ft.observe.report.goodput import goodput
    from ft.observe.report.page import page
    from ft.observe.report.summary import summary
    from ft.observe.report.timeline import draw

    found = recoveries(run.events)
    times = goodput(run.metrics, run.events, found)
    picture = draw(run, found)
    pages = {run.folder / "timeline.png": picture, run.folder / "report.html": page(run, found, times, picture)}
    written, problem = replace_all(pages)
    return summary(run, found, times, written), problem


def _now(folder: str) -> tuple[str, dict[str, Any], bool]:
    """Return the current status of the run as (text, JSON values, whether the run has ended)."""
    if is_hsdp(folder):
        return hsdp.now(folder)
    run = load(folder)
    found = status(run, time.time())
    if not found.ended and (why := gone(run.folder, found.age, found.nodes)):
        run = load(folder)  # read again: the run may have ended while its lease was watched for renewals
        found = status(run, time.time(), why)
    return as_text(found, str(run.folder)), as_values(found), found.ended


def _run_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="RUN", help="the folder that was given to ft run as --run-dir")
