"""The stored looks of a run: what all workers were doing at one moment, one folder per look with a file per node."""

import json
from pathlib import Path

from ft.base.errors import UserError
from ft.faults.hang.look import DEAD, Look, Rank
from ft.net.codec import BadMessage, Numbers, from_json

_FOLDER, _WANTED = "looks", "wanted"


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
    ranks: dict[int, Rank] = {}
    groups: dict[str, tuple[int, ...]] = {}
    seats: dict[str, str] = {}
    wall, why = 0.0, ""
    for file in files:
        try:
            values = json.loads(file.read_text())
            for said in values["ranks"]:
                rank = from_json(Rank, said)
                ranks[rank.rank] = rank
            groups |= {name: tuple(Numbers.from_json(members)) for name, members in values["groups"].items()}
            seats |= values["seats"]
            wall, why = max(wall, float(values["wall"])), str(values["why"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError, BadMessage) as error:
            raise UserError(
                f"{file} cannot be read ({type(error).__name__}: {error})", "choose another look with --look"
            ) from error
    for name, worker in seats.items():
        if int(name) not in ranks:
            ranks[int(name)] = Rank(int(name), worker, worker.partition(".")[0], DEAD, answers=False)
    return Look(ranks, groups, wall, why)
