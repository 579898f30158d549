"""Implement ``ft diagnose hang``: say which rank a run waits for, in which operation, and where that rank is."""

import argparse
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ft.base.errors import UserError

if TYPE_CHECKING:
    from ft.faults.hang.look import Look

_DESCRIPTION = """\
Say why a run hangs: which logical rank the others wait for, in which operation, and where that rank is instead. The
answer follows from the wait-for graph over all process groups (FT-HSDP, section 2.3). A run takes a look at all its
workers by itself before a time limit passes; while a run is under way, this command asks for a new one. With --traces,
the dumps of torch's flight recorder are read instead, which every run under torchrun can write."""

_EPILOG = "exit code: 0 nobody is at fault, 1 a cause was found, 2 there is nothing to read"
_PATIENCE_S = 5.0


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
        taken = _of_run(given.run, given.look, given.looks if asks else 0, given.every)
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


def _of_run(folder: Path, number: int | None, wanted: int, every_s: float) -> list["Look"]:
    """Return ``wanted`` new looks if the run is under way, else the stored look of this number (None: the newest)."""
    from ft.record import looks
    from ft.record.run import read_status

    if not folder.is_dir():
        raise UserError(f"{folder} is no folder", "give the folder that was given to ft run as --run-dir")
    if replicas := sorted(one.name for one in folder.glob("replica-*") if one.is_dir()):
        problem = f"{folder} is a run of {len(replicas)} replicas, each of which has its own processes"
        raise UserError(problem, f"give the folder of one, such as {folder / replicas[0]}")
    taken: list[Look] = []
    if wanted and _is_live(folder):
        for at in range(wanted):
            if at:
                time.sleep(every_s)
            if (new := _ask(folder, looks.numbers(folder), _nodes(read_status(folder)))) is None:
                break
            taken.append(looks.read(folder, new))
    if taken:
        return taken
    known = looks.numbers(folder)
    if number is None and not known:
        raise UserError(
            f"{folder} contains no look at its workers",
            "looks are taken before a time limit passes, or when this command runs while the run does",
        )
    return [looks.read(folder, known[-1] if number is None else number)]


def _is_live(folder: Path) -> bool:
    from ft.record.run import load

    try:
        return load(folder).state == "not ended"
    except UserError:  # the folder has no events; a look may have been stored
        return False


def _nodes(status: dict[str, Any]) -> set[str]:
    """Return the nodes of which a worker holds a logical rank; only these store a part of a look."""
    seats = status.get("seats")
    return {str(seat.get("node")) for seat in seats.values()} if isinstance(seats, dict) else set()


def _ask(folder: Path, known: list[int], nodes: set[str]) -> int | None:
    """Ask the run for a look. Return its number, or None if no answer comes."""
    from ft.record import looks

    try:
        looks.wanted(folder).parent.mkdir(exist_ok=True)
        looks.wanted(folder).write_text("asked for by ft diagnose hang")
    except OSError as error:
        raise UserError(f"{folder} cannot be written: {error.strerror}", "read a stored look with --stored") from error
    deadline = time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline:
        new = [number for number in looks.numbers(folder) if number not in known]
        if new:
            _await_nodes(folder, new[-1], nodes, deadline)
            return new[-1]
        time.sleep(0.05)
    looks.wanted(folder).unlink(missing_ok=True)
    return None


def _await_nodes(folder: Path, number: int, nodes: set[str], deadline: float) -> None:
    """Wait until all nodes have stored their part, at most until ``deadline``; a lost node never does."""
    from ft.record import looks

    while time.monotonic() < deadline and not all(looks.path(folder, number, node).exists() for node in nodes):
        time.sleep(0.05)
