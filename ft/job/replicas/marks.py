"""Marker files in the run's folder by which launchers tell each other which replicas have finished or were given up."""

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

from ft.base.files import open_no_link
from ft.job.replicas.policy import ENDS

GIVEN_UP = "given up"
_FOLDER = "ended"


@dataclass(frozen=True)
class Marks:
    """Replicas that have ended, by how they ended."""

    finished: frozenset[int] = frozenset()
    given_up: frozenset[int] = frozenset()


def put(run_dir: Path, replica: int, mark: str) -> None:
    """Mark how a replica has ended.

    Raises:
        OSError: the folder cannot be written.
    """
    folder = run_dir / _FOLDER
    folder.mkdir(exist_ok=True)
    temporary = folder / f".{replica}.{os.getpid()}"
    with open(temporary, "w", opener=open_no_link) as file:
        file.write(mark)
    temporary.replace(folder / str(replica))


def clear(run_dir: Path, replica: int) -> None:
    """Remove the mark of a replica that is started again."""
    with contextlib.suppress(FileNotFoundError):
        (run_dir / _FOLDER / str(replica)).unlink()


def read(run_dir: Path) -> Marks:
    """Return all marks, without those that cannot be read now."""
    finished, given_up = set(), set()
    with contextlib.suppress(OSError):
        for name in os.listdir(run_dir / _FOLDER):
            with contextlib.suppress(OSError):
                mark = (run_dir / _FOLDER / name).read_text() if name.isdecimal() else ""
                if mark in ENDS.values():
                    finished.add(int(name))
                elif mark == GIVEN_UP:
                    given_up.add(int(name))
    return Marks(frozenset(finished), frozenset(given_up))
