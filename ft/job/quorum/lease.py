"""Where the quorum server of a run is: ``RUN_DIR/quorum.json``, rewritten by each server that takes over.

Terms are claimed as those of the control plane are (:mod:`ft.platform.election`), in the folder of the whole run: a
claim can be made only once, and who finds a newer one than his own has been succeeded.
"""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from ft.platform import election as election

_FILE = "quorum.json"


@dataclass(frozen=True)
class LeaseRecord:
    """A server.

    Attributes:
        where: its address, "tcp://HOST:PORT". term: that it has claimed. pid: its process there.
        end: (next_step, lineage) of a replica that has done the last step, once there is one: it leaves, and nobody
            else could tell the next server.
    """

    where: str
    term: int
    pid: int = 0
    end: tuple[int, int] | None = None


def claim(run_dir: Path, least: int) -> int:
    """Claims the next term that is free, ``least`` or a later one; returns it.

    Raises:
        OSError: the directory cannot be written.
    """
    term = max(least, election.newest(run_dir) + 1)
    while not election.claim(run_dir, term, str(os.getpid())):
        term += 1
    return term


def is_succeeded(run_dir: Path, term: int) -> bool:
    """Whether a later term was claimed."""
    return election.newest(run_dir) > term


def read(run_dir: Path) -> LeaseRecord | None:
    """The standing, None where there is none, or none that can be read."""
    try:
        values = json.loads((run_dir / _FILE).read_text())
        end = values.get("end")
        ended = (int(end[0]), int(end[1])) if end is not None else None
        return LeaseRecord(str(values["where"]), int(values["term"]), int(values.get("pid", 0)), ended)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError):
        return None


def write(run_dir: Path, standing: LeaseRecord) -> None:
    """Readers see the old or the new one, never half of one.

    Raises:
        OSError: the directory cannot be written.
    """
    temporary = run_dir / f".{_FILE}.{standing.term}.tmp"
    temporary.write_text(json.dumps(asdict(standing)))
    temporary.replace(run_dir / _FILE)
