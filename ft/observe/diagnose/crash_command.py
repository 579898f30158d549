"""Implement ``ft diagnose crash``: the first cause of a crash, in the order of causes and not of clocks."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ft.record.crash import Crash

_DESCRIPTION = """\
Read the events, the journal and the logs of runs, and say of many ranks' errors which came first in the order of
causes: an exception of the program, too little memory or a device error before lost connections, waits that timed out
and processes that ft run itself has ended. Equal errors of many ranks count once; the stack is printed once; the other
errors are counted. Times decide only between errors of one class."""

_EPILOG = "exit code: 0 no run has crashed, 1 there is a first cause, 2 a run cannot be read"


def add_parser(subparsers) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "crash",
        help="say which of many ranks' errors was the first cause of a crash, with its stack",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "runs", metavar="RUN", nargs="+", type=Path, help="folder that was given to ft run as --run-dir"
    )
    parser.add_argument("--json", action="store_true", help="print JSON, one object for each run, instead of text")
    parser.set_defaults(main=run)


def run(given: argparse.Namespace) -> int:
    """Print the first cause of each run's crash.

    Returns:
        0 if no run has crashed, 1 otherwise.

    Raises:
        UserError: a folder contains no run, or cannot be read.
    """
    from ft.record import crash, crash_text
    from ft.record.run import EVENTS

    found: dict[str, Crash] = {}
    for folder in given.runs:
        replicas = sorted(each for each in folder.glob("replica-*") if (each / EVENTS).is_file())
        found |= {str(each): crash.read(each) for each in replicas or [folder]}
    if given.json:
        values = [{"run": name, "state": one.state, **_values(one)} for name, one in found.items()]
        print(json.dumps(values))
    else:
        texts = [
            f"{name}: {one.state}\n{crash_text.as_text(one.found) if one.found else _nothing(name, one)}"
            for name, one in found.items()
        ]
        print("\n\n".join(texts))
    return 1 if any(one.found is not None or one.state.startswith("stopped") for one in found.values()) else 0


def _values(one: "Crash") -> dict:
    from ft.record import crash_text

    told = {"message": one.message, "started": one.started}
    return told if one.found is None else {**told, **crash_text.as_values(one.found)}


def _nothing(name: str, one: "Crash") -> str:
    """Return what there is to say of a run without a first cause."""
    from ft.record.run import is_planned_end

    if one.state.startswith("stopped"):
        hint = "" if one.started else f"\nit never made a step: ft diagnose start {name}"
        return f"no worker had an error; the run said: {one.message}{hint}"
    if is_planned_end(one.state):
        recovered = len({error.attempt for error in one.errors if not error.by_us})
        return f"no crash; {recovered} fault(s) were recovered from" if recovered else "no crash, and no error"
    return "no error so far"
