"""Implement ``ft diagnose hang``: say which rank a run waits for, in which operation, and where that rank is."""

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ft.base import events
from ft.base.errors import UserError
from ft.observe.diagnose.looking import looks_of
from ft.record.run import EVENTS

if TYPE_CHECKING:
    from ft.faults.hang.look import Look

_DESCRIPTION = """\
Say why a run hangs: which logical rank the others wait for, in which operation, and where that rank is instead. The
answer follows from the wait-for graph over all process groups (FT-HSDP, section 2.3). A run takes a look at all its
workers by itself before a time limit passes; while a run is under way, this command asks for a new one. Of a run of
replicas, all replicas are asked, and the graph contains their waits for the quorum and for each other's gradients. With
--traces, the dumps of torch's flight recorder are read instead, which every run under torchrun can write."""

_EPILOG = "exit code: 0 nobody is at fault, 1 a cause was found, 2 there is nothing to read"


def add_parser(subparsers) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "hang",
        help="say which rank a hanging run waits for, and where that rank is",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("run", metavar="RUN", nargs="?", type=Path, help="folder that was given to ft run as --run-dir")
    source.add_argument("--traces", metavar="FOLDER", type=Path, help="folder with dumps of torch's flight recorder")
    parser.add_argument("--look", type=int, metavar="N", help="number of the look to read (default: the newest)")
    parser.add_argument("--looks", type=int, default=1, metavar="N", help="take N looks, to tell who slows a run down")
    parser.add_argument("--every", type=float, default=0.3, metavar="S", help="seconds between looks (default: 0.3)")
    parser.add_argument("--stored", action="store_true", help="read the newest stored look, and ask for no new one")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw who waits for whom (.png, .svg or .pdf)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.set_defaults(main=run)


def run(given: argparse.Namespace) -> int:
    """Print the causes.

    Returns:
        0 if there is none, 1 otherwise.

    Raises:
        UserError: there is no look to read, or it cannot be read.
    """
    from ft.faults.hang.series import over_time
    from ft.observe.diagnose.hang import as_text, as_values

    if given.looks < 1 or given.every <= 0:
        raise UserError("--looks must be at least 1, and --every above 0", "leave them out for a single look")
    if given.traces is not None:
        taken = [_traces(given.traces)]
    else:
        asks = given.look is None and not given.stored
        hosts = events.hosts(events.read(given.run / EVENTS))
        taken = [
            replace(look, hosts=hosts)
            for look in looks_of(given.run, given.look, given.looks if asks else 0, given.every)
        ]
    look, found = taken[-1], over_time(taken)
    if given.picture is not None:
        from ft.observe.diagnose.hang_picture import save

        try:
            save(given.picture, look, found)
        except (OSError, ValueError) as error:
            raise UserError(f"{given.picture} cannot be written: {error}", "name a .png, .svg or .pdf file") from error
    print(json.dumps(as_values(look, found)) if given.json else as_text(look, found))
    return 1 if found.causes else 0


def _traces(folder: Path) -> "Look":
    from ft.observe.diagnose.flight_recorder import read

    return read(folder)
