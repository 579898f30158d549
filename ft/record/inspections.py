"""The stored inspections of a run: what all workers were doing at one moment, one folder per inspection with a file per
node.

In a run of replicas (FT-HSDP) each replica's folder has its own inspections. Those of about the same time are a moment
of the run; the launcher that keeps the quorum server adds what the operating system says of that process.
"""

import json
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from ft.base import bounded_json, files
from ft.base.errors import UserError
from ft.faults.hang.inspection import DEAD, Inspection, Rank, ReplicaGroup, united
from ft.faults.hang.replicas import combine
from ft.net.codec import BadMessage, Numbers, from_json, to_json
from ft.record.run import NOT_ENDED, entries, load, read_status, replicas
from ft.show.text import spans

_FOLDER, _WANTED, _SERVER = "inspections", "wanted", "server.jsonl"
_WALL = re.compile(rb'"wall":\s*([0-9.e+]+)')
_HEAD_BYTES = 4096
_TOGETHER_S = 60.0
"""Seconds within which all nodes have written their parts of one inspection, by clocks that may differ."""
_MOMENT_S = 3.0
"""Seconds within which inspections of different replicas belong to one moment."""


@dataclass(frozen=True)
class _Part:
    """The file in which one node has stored what its workers were doing; ``seats``: logical rank -> worker."""

    wall: float
    why: str
    ranks: list[Rank]
    groups: dict[str, Numbers]
    seats: dict[int, str]
    across: dict[str, ReplicaGroup] = field(default_factory=dict)
    number: int = 0
    node: str = ""


def path(run: Path, number: int, node: str) -> Path:
    """Return the path of the file in which a node stores its workers' answers to inspection ``number`` of a run."""
    return run / _FOLDER / f"{number:04d}" / f"{node}.json"


def wanted(run: Path) -> Path:
    """Return the path of the file with which a person asks a run for an inspection."""
    return run / _FOLDER / _WANTED


def want(run: Path, why: str) -> None:
    """Ask a run for an inspection.

    Raises:
        OSError: the folder cannot be written.
    """
    wanted(run).parent.mkdir(exist_ok=True)
    files.replace(wanted(run), why)


def numbers(run: Path) -> list[int]:
    """Return the numbers of the stored inspections of a run, the oldest first."""
    folder = run / _FOLDER
    names = [one.name for one in folder.iterdir()] if folder.is_dir() else []
    return sorted(int(name) for name in names if name.isdigit())


def read(run: Path, number: int) -> Inspection:
    """Return a stored inspection. Ranks of which no node says anything are dead.

    Of a replica, the inspection says of the ranks of others only that its own ranks wait for them.

    Raises:
        UserError: the inspection does not exist, or a file of it cannot be read.
    """
    return _of_replica(run, _read(run, number))


def of_parts(run: Path, said: Iterable[Mapping[str, Any]]) -> Inspection:
    """Return the inspection that the nodes' parts, as they are stored, make up; see :func:`read`.

    Args:
        said: JSON values of the parts, at least one.

    Raises:
        UserError: a part is not one.
    """
    return _of_replica(run, _united([_part(values, "an answer to an inspection") for values in said]))


def _of_replica(run: Path, seen: Inspection) -> Inspection:
    replica = _replica(run)
    if replica is None:
        return seen
    return combine({replica: seen}, server=_server(run.parent, seen.wall), home=replica)


def _read(run: Path, number: int) -> Inspection:
    paths = sorted((run / _FOLDER / f"{number:04d}").glob("*.json"))
    if not paths:
        raise UserError(f"{run} has no inspection {number}", "list the folder inspections in it")
    return _united([_part(path, str(path)) for path in paths])


def _united(parts: Sequence[_Part]) -> Inspection:
    newest = max(part.wall for part in parts)
    # A run that has lost its journal counts its inspections from 1 again; a node that is gone leaves its old part
    # behind.
    parts = [part for part in parts if newest - part.wall < _TOGETHER_S]
    ranks = {rank.rank: rank for part in parts for rank in part.ranks}
    groups = {name: tuple(members) for part in parts for name, members in part.groups.items()}
    seats = {rank: worker for part in parts for rank, worker in part.seats.items()}
    for rank in seats.keys() - ranks.keys():
        ranks[rank] = Rank(rank, seats[rank], seats[rank].partition(".")[0], DEAD, answers=False)
    return Inspection(ranks, groups, newest, parts[0].why, united(part.across for part in parts))


def _part(values: Any, source: str) -> _Part:
    try:
        return from_json(_Part, bounded_json.loads(files.read(values)) if isinstance(values, Path) else values)
    except (OSError, ValueError, BadMessage) as error:
        problem = f"{source} cannot be read ({type(error).__name__}: {error})"
        raise UserError(problem, "choose another inspection with --inspection") from error


# --- runs of replicas ------------------------------------------------------------------------------------------------


def _replica(run: Path) -> int | None:
    """Return which replica the folder ``run`` belongs to; None if it is the folder of a run without replicas."""
    run = run.resolve()
    known = replicas(run.parent) if (run.parent / "quorum.json").exists() else {}
    return next((number for number, own in known.items() if own == run), None)


def together(found: Iterable[tuple[float, int, int]]) -> list[dict[int, int]]:
    """Return which inspections are those of one moment, the oldest first: inspections of different replicas, none long
    after the first of them, as replica -> number.

    Args:
        found: (time in seconds since 1970, replica, number) of each inspection.
    """
    moments: list[dict[int, int]] = []
    began = 0.0
    for wall, replica, number in sorted(found):
        if not moments or replica in moments[-1] or wall - began > _MOMENT_S:
            moments.append({})
            began = wall
        moments[-1][replica] = number
    return moments


def stored(run: Path) -> dict[int, Callable[[], Inspection]]:
    """Return number -> function that reads it, for each stored inspection; one at replicas is at those of the same
    moment."""
    if not (own := replicas(run)):
        return {number: partial(read, run, number) for number in numbers(run)}
    taken = [
        (wall, replica, number)
        for replica, folder in own.items()
        for number in numbers(folder)
        if (wall := _taken_at(folder, number)) is not None
    ]
    return {number: partial(read_together, run, inspections) for number, inspections in enumerate(together(taken), 1)}


def _taken_at(folder: Path, number: int) -> float | None:
    """Return the time of an inspection, without reading the whole of it; None if that cannot be told."""
    for file in sorted((folder / _FOLDER / f"{number:04d}").glob("*.json")):
        try:
            with file.open("rb") as content:
                match = _WALL.search(content.read(_HEAD_BYTES))
            return float(match[1]) if match is not None else None
        except (OSError, ValueError):
            continue
    return None


def read_together(run: Path, inspections: Mapping[int, int], lost: Iterable[int] = ()) -> Inspection:
    """Return one inspection of the replicas of a run.

    Args:
        lost: replicas that were asked and have not answered.

    Raises:
        UserError: an inspection does not exist, or cannot be read.
    """
    known = replicas(run)
    found = {replica: _read(known[replica], number) for replica, number in inspections.items()}
    wall = max((seen.wall for seen in found.values()), default=0.0)
    return combine(found, lost, known, _server(run, wall))


# --- the quorum server -----------------------------------------------------------------------------------------------


def note_server(run: Path, wall: float, said: Rank) -> None:
    """Store what the operating system says of the quorum server's process at a time, in seconds since 1970.

    Raises:
        OSError: the folder cannot be written.
    """
    (run / _FOLDER).mkdir(exist_ok=True)
    with open(run / _FOLDER / _SERVER, "a", opener=files.open_no_link) as file:
        file.write(json.dumps({"wall": wall, "said": to_json(said)}) + "\n")


def _server(run: Path, wall: float) -> Rank | None:
    """Return what is known of the quorum server's process at the time of an inspection."""
    best: tuple[float, Any] | None = None
    for values in entries(run / _FOLDER / _SERVER):
        try:
            apart = abs(float(values["wall"]) - wall)
        except (ValueError, KeyError, TypeError):
            continue
        if apart < _MOMENT_S and (best is None or apart < best[0]):
            best = apart, values.get("said")
    try:
        return None if best is None else from_json(Rank, best[1])
    except BadMessage:
        return None


_PATIENCE_S = 5.0
"""Seconds for which an answer is awaited."""
_REST_S = 1.5
"""Seconds for which the answers of further replicas are awaited after the first one."""
_PAUSE_S = 0.05
_ASKED = "asked for by ft diagnose hang"


def inspections_of(folder: Path, number: int | None, wanted: int, every_s: float) -> list[Inspection]:
    """Return inspections of a run.

    Args:
        folder: folder of the run, of a run of replicas, or of one replica.
        number: number of the stored inspection to read if no new one is wanted or comes; None: the newest.
        wanted: number of inspections to ask a run for that is under way. A run of replicas is asked at least twice,
            because some replicas may hang while others train on.
        every_s: seconds between two of them.

    Raises:
        UserError: there is no inspection to read, or it cannot be read.
    """
    if not folder.is_dir():
        raise UserError(f"{folder} is no folder", "give the folder that was given to ft run as --run-dir")
    own = replicas(folder)
    live = {replica: one for replica, one in (own or {0: folder}).items() if wanted and _is_live(one)}
    taken: list[Inspection] = []
    lost: set[int] = set()
    for at in range(max(2 if own else 1, wanted) if live else 0):
        if at:
            time.sleep(every_s)
        before = {replica: read_status(one) for replica, one in live.items()}
        found = _ask(live)
        if not found:
            break
        # A control plane that lives writes its status twice a second.
        lost |= {one for one in live.keys() - found.keys() if before[one] and before[one] == read_status(live[one])}
        taken.append(read_together(folder, found, lost) if own else read(folder, found[0]))
        live = {replica: live[replica] for replica in found}
    if taken:
        return taken
    known = stored(folder)
    if not known:
        raise UserError(
            f"{folder} contains no inspection of its workers",
            "inspections are made before a time limit passes, or when this command runs while the run does",
        )
    number = max(known) if number is None else number
    if number not in known:
        raise UserError(f"{folder} has no inspection {number}", f"it has inspections {spans(known)}")
    return [known[number]()]


def _is_live(folder: Path) -> bool:
    try:
        return load(folder).state == NOT_ENDED
    except UserError:  # the folder has no events; an inspection may have been stored
        return False


def _ask(folders: Mapping[int, Path]) -> dict[int, int]:
    """Ask runs, or all replicas of one, for an inspection of the same time; return replica -> number of its inspection,
    for those that have answered.
    """
    known = {replica: set(numbers(folder)) for replica, folder in folders.items()}
    nodes = {replica: _nodes(read_status(folder)) for replica, folder in folders.items()}
    for folder in folders.values():
        try:
            want(folder, _ASKED)
        except OSError as error:
            fix = "read a stored inspection with --stored"
            raise UserError(f"{folder} cannot be written: {error.strerror}", fix) from error
    found: dict[int, int] = {}
    deadline = until = time.monotonic() + _PATIENCE_S
    while time.monotonic() < until and found.keys() != folders.keys():
        time.sleep(_PAUSE_S)
        for replica in folders.keys() - found.keys():
            new = set(numbers(folders[replica])) - known[replica]
            if new and not found:
                until = min(deadline, time.monotonic() + _REST_S)
            found |= {replica: max(new)} if new else {}
    for replica, number in found.items():
        _await_nodes(folders[replica], number, nodes[replica], deadline)
    for replica in folders.keys() - found.keys():
        wanted(folders[replica]).unlink(missing_ok=True)
    return found


def _nodes(status: Mapping[str, Any]) -> set[str]:
    """Return the nodes of which a worker holds a logical rank; only these store a part of an inspection."""
    seats = status.get("seats")
    return {str(seat.get("node")) for seat in seats.values()} if isinstance(seats, dict) else set()


def _await_nodes(folder: Path, number: int, nodes: Iterable[str], deadline: float) -> None:
    """Wait until all nodes have stored their part, at most until ``deadline``; a lost node never does."""
    while time.monotonic() < deadline and not all(path(folder, number, node).exists() for node in nodes):
        time.sleep(_PAUSE_S)
