"""Implement ``ft diagnose start``: why a run has never made its first step."""

import argparse
import json
import time
from pathlib import Path

_DESCRIPTION = """\
Read the folder of a run that never made its first step, and say why: which agents joined and which did not, what
differs between the nodes (versions, flags, paths of the command line), addresses that others cannot reach, clocks that
differ, workers that did not come up and their first error, another run in the folder. ft run itself refuses most of
this within 30 s; the command also tells of runs that have not ended or that were killed."""

_EPILOG = "exit code: 0 nothing kept the run from starting, 1 there is a reason, 2 the folder cannot be read"


def add_parser(subparsers) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "start",
        help="say why a run has never made its first step",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", metavar="RUN", type=Path, help="folder that was given to ft run as --run-dir")
    parser.add_argument(
        "--rdzv-endpoint",
        metavar="HOST:PORT",
        default="",
        help="try this address of the control plane from this machine, and name the process that holds its port here "
        "(default: the address in the folder)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.set_defaults(main=run)


def run(given: argparse.Namespace) -> int:
    """Print why the run has not started.

    Returns:
        0 if nothing kept it from starting, 1 otherwise.

    Raises:
        UserError: there is no such folder, or the endpoint is no host:port.
    """
    from ft.record import start as starts

    start = starts.look(starts.read(given.run), given.rdzv_endpoint)
    found = starts.findings(start, time.time())
    print(json.dumps(starts.as_values(start, found)) if given.json else starts.as_text(str(given.run), start, found))
    return 1 if any(one.is_cause for one in found) and not start.has_begun else 0
