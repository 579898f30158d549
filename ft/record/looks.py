"""The stored looks of a run: what all workers were doing at one moment, one folder per look with a file per node."""

import json
from dataclasses import dataclass
from pathlib import Path

from ft.base.errors import UserError
from ft.faults.hang.look import DEAD, Look, Rank
from ft.net.codec import BadMessage, Numbers, from_json

_FOLDER, _WANTED = "looks", "wanted"
_TOGETHER_S = 60.0
"""Seconds within which all nodes have written their parts of one look, by clocks that may differ."""


@dataclass(frozen=True)
class _Part:
    """What one node has stored of a look."""

    wall: float
    why: str
    ranks: list[Rank]
    groups: dict[str, tuple[int, ...]]
    seats: dict[str, str]


def path(run: Path, number: int, node: str) -> Path:
    """Return the path of one node's part of a look.

    Args:
        run: folder of the run.
        number: number of the look.
        node: name of the node's agent.
    """
    return run / _FOLDER / f"{number:04d}" / f"{node}.json"


def wanted(run: Path) -> Path:
    """Return the path of the file with which a person asks a run for a look."""
    return run / _FOLDER / _WANTED


def numbers(run: Path) -> list[int]:
    """Return the numbers of the stored looks of a run, the oldest first."""
    folder = run / _FOLDER
    names = [one.name for one in folder.iterdir()] if folder.is_dir() else []
    return sorted(int(name) for name in names if name.isdigit())


def read(run: Path, number: int) -> Look:
    """Return a stored look. Ranks of which no node says anything are dead.

    Raises:
        UserError: the look does not exist, or a file of it cannot be read.
    """
    files = sorted((run / _FOLDER / f"{number:04d}").glob("*.json"))
    if not files:
        raise UserError(f"{run} has no look {number}", "list the folder looks in it")
    parts = [_part(file) for file in files]
    newest = max(part.wall for part in parts)
    # A run that has lost its journal counts its looks from 1 again; a node that is gone leaves its old part behind.
    parts = [part for part in parts if newest - part.wall < _TOGETHER_S]
    ranks = {rank.rank: rank for part in parts for rank in part.ranks}
    groups = {name: members for part in parts for name, members in part.groups.items()}
    seats = {name: worker for part in parts for name, worker in part.seats.items()}
    for name, worker in seats.items():
        if int(name) not in ranks:
            ranks[int(name)] = Rank(int(name), worker, worker.partition(".")[0], DEAD, answers=False)
    return Look(ranks, groups, newest, parts[0].why)


def _part(file: Path) -> _Part:
    try:
        values = json.loads(file.read_text())
        return _Part(
            wall=float(values["wall"]),
            why=str(values["why"]),
            ranks=[from_json(Rank, said) for said in values["ranks"]],
            groups={name: tuple(Numbers.from_json(members)) for name, members in values["groups"].items()},
            seats={str(int(name)): str(worker) for name, worker in values["seats"].items()},
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, BadMessage) as error:
        problem = f"{file} cannot be read ({type(error).__name__}: {error})"
        raise UserError(problem, "choose another look with --look") from error
