"""Ask a run for looks at its workers, and read those that it has stored, for ``ft diagnose hang``."""

import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ft.base.errors import UserError
from ft.faults.hang.look import Look
from ft.record import looks
from ft.record.run import NOT_ENDED, load, read_status

_PATIENCE_S = 5.0
"""Seconds for which an answer is awaited."""
_REST_S = 1.5
"""Seconds for which the answers of further replicas are awaited after the first one."""
_PAUSE_S = 0.05
_ASKED = "asked for by ft diagnose hang"


def looks_of(folder: Path, number: int | None, wanted: int, every_s: float) -> list[Look]:
    """Return looks at a run.

    Args:
        folder: folder of the run, of a run of replicas, or of one replica.
        number: number of the stored look to read if no new one is wanted or comes; None: the newest.
        wanted: number of looks to ask a run for that is under way. A run of replicas is asked at least twice, because
            some replicas may hang while others train on.
        every_s: seconds between two of them.

    Raises:
        UserError: there is no look to read, or it cannot be read.
    """
    if not folder.is_dir():
        raise UserError(f"{folder} is no folder", "give the folder that was given to ft run as --run-dir")
    if replicas := looks.folders(folder):
        return _of_replicas(folder, replicas, number, wanted, every_s)
    taken: list[Look] = []
    if wanted and _is_live(folder):
        for at in range(wanted):
            if at:
                time.sleep(every_s)
            if (new := ask(folder)) is None:
                break
            taken.append(looks.read(folder, new))
    if taken:
        return taken
    known = looks.numbers(folder)
    if number is None and not known:
        raise _nothing(folder)
    return [looks.read(folder, known[-1] if number is None else number)]


def _nothing(folder: Path) -> UserError:
    return UserError(
        f"{folder} contains no look at its workers",
        "looks are taken before a time limit passes, or when this command runs while the run does",
    )


def _of_replicas(
    folder: Path, replicas: Mapping[int, Path], number: int | None, wanted: int, every_s: float
) -> list[Look]:
    live = {replica: own for replica, own in replicas.items() if wanted and _is_live(own)}
    taken: list[Look] = []
    lost: set[int] = set()
    for at in range(max(2, wanted) if live else 0):
        if at:
            time.sleep(every_s)
        before = {replica: read_status(own) for replica, own in live.items()}
        found = _ask(live)
        if not found:
            break
        # A control plane that lives writes its status twice a second.
        lost |= {one for one in live.keys() - found.keys() if before[one] and before[one] == read_status(live[one])}
        taken.append(looks.read_together(folder, found, lost))
        live = {replica: live[replica] for replica in found}
    if taken:
        return taken
    moments = looks.moments(folder)
    if not moments:
        raise _nothing(folder)
    if number is not None and not 1 <= number <= len(moments):
        raise UserError(f"{folder} has no look {number}", f"it has looks 1 to {len(moments)}, each at all replicas")
    return [looks.read_together(folder, moments[-1 if number is None else number - 1].numbers)]


def _is_live(folder: Path) -> bool:
    try:
        return load(folder).state == NOT_ENDED
    except UserError:  # the folder has no events; a look may have been stored
        return False


def ask(folder: Path) -> int | None:
    """Ask a run, or one replica, for a look. Return its number, or None if no answer comes."""
    return _ask({0: folder}).get(0)


def _ask(folders: Mapping[int, Path]) -> dict[int, int]:
    """Ask runs, or all replicas of one, for a look at the same time.

    Args:
        folders: replica -> its folder.

    Returns:
        Replica -> number of its look, for those that have answered.
    """
    known = {replica: set(looks.numbers(folder)) for replica, folder in folders.items()}
    nodes = {replica: _nodes(read_status(folder)) for replica, folder in folders.items()}
    for folder in folders.values():
        _want(folder)
    found: dict[int, int] = {}
    deadline = until = time.monotonic() + _PATIENCE_S
    while time.monotonic() < until and found.keys() != folders.keys():
        time.sleep(_PAUSE_S)
        for replica in folders.keys() - found.keys():
            new = set(looks.numbers(folders[replica])) - known[replica]
            if new and not found:
                until = min(deadline, time.monotonic() + _REST_S)
            found |= {replica: max(new)} if new else {}
    for replica, number in found.items():
        _await_nodes(folders[replica], number, nodes[replica], deadline)
    for replica in folders.keys() - found.keys():
        looks.wanted(folders[replica]).unlink(missing_ok=True)
    return found


def _want(folder: Path) -> None:
    try:
        looks.want(folder, _ASKED)
    except OSError as error:
        raise UserError(f"{folder} cannot be written: {error.strerror}", "read a stored look with --stored") from error


def _nodes(status: Mapping[str, Any]) -> set[str]:
    """Return the nodes of which a worker holds a logical rank; only these store a part of a look."""
    seats = status.get("seats")
    return {str(seat.get("node")) for seat in seats.values()} if isinstance(seats, dict) else set()


def _await_nodes(folder: Path, number: int, nodes: Iterable[str], deadline: float) -> None:
    """Wait until all nodes have stored their part, at most until ``deadline``; a lost node never does."""
    while time.monotonic() < deadline and not all(looks.path(folder, number, node).exists() for node in nodes):
        time.sleep(_PAUSE_S)
