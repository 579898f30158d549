"""``ft status RUN`` and ``ft report RUN``."""

import argparse
import json
import sys
import time
from pathlib import Path

from ft.errors import UserError
from ft.report.recoveries import recoveries
from ft.report.run import Run, load
from ft.report.status import as_text, as_values, status

_WATCH_S = 1.0
_CLEAR = "\x1b[H\x1b[2J"


def add_parsers(subparsers) -> None:
    """Adds both subcommands; each sets ``main``, a function of the parsed arguments that returns the exit code."""
    parser = subparsers.add_parser("status", help="who is in a run, at which step and epoch")
    _run_argument(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")
    parser.add_argument("--watch", action="store_true", help="again every second, until the run ends")
    parser.set_defaults(main=run_status)
    parser = subparsers.add_parser("report", help="write report.html and timeline.png of a run")
    _run_argument(parser)
    parser.set_defaults(main=run_report)


def run_status(arguments: argparse.Namespace) -> int:
    """Prints the state of a run.

    Raises:
        UserError: there is none.
    """
    try:
        while True:
            run = load(arguments.folder)
            now = status(run, time.time())
            text = json.dumps(as_values(now)) if arguments.json else as_text(now, str(run.folder))
            print(_CLEAR + text if arguments.watch and sys.stdout.isatty() else text, flush=True)
            if not arguments.watch or now.ended:
                return 0
            time.sleep(_WATCH_S)
    except KeyboardInterrupt:
        return 0


def run_report(arguments: argparse.Namespace) -> int:
    """Writes and names both files and prints a summary.

    Raises:
        UserError: there is no run, or its folder cannot be written.
    """
    print(write_report(load(arguments.folder)))
    return 0


def write_report(run: Run) -> str:
    """Writes ``timeline.png`` and ``report.html`` into the run's folder.

    Returns:
        a summary for the terminal, with their paths.

    Raises:
        UserError: the folder cannot be written.
    """
    # Matplotlib takes longer to import than everything else that the command line does.
    from ft.report.goodput import goodput
    from ft.report.page import page
    from ft.report.summary import summary
    from ft.report.timeline import draw

    found = recoveries(run.events)
    times = goodput(run.metrics, run.events, found)
    picture, report = run.folder / "timeline.png", run.folder / "report.html"
    try:
        draw(run, found, picture)
        _replace(report, page(run, found, times, picture.read_bytes()))
    except OSError as error:
        raise UserError(f"the report cannot be written: {error}", "make the run's folder writable") from error
    return summary(run, found, times, [picture, report])


def _replace(path: Path, text: str) -> None:
    """A reader sees the old file or the new one."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def _run_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="RUN", help="the folder that ft run got as --run-dir")
