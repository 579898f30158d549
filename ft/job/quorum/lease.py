"""Lease record and terms of a run's quorum server: ``RUN_DIR/quorum.json``, rewritten by each server that takes over.

The quorum server decides which replicas take part in a training step. A term is the number of a server; terms are
claimed like those of the control plane (:mod:`ft.platform.election`), in the folder of the whole run. A term can be
claimed only once. A server that finds a later term than its own has been replaced.
"""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from ft.platform import election as election

_FILE = "quorum.json"


@dataclass(frozen=True)
class LeaseRecord:
    """Address and term of the present quorum server.

    Attributes:
        where: address of the server, "tcp://HOST:PORT".
        term: term that it has claimed.
        pid: its process id on that host.
        end: (next_step, lineage) of a replica that has done the last step, or None: its number of committed steps, and
            the number of the quorum that committed the last of them. It is stored here because that replica leaves, and
            the next server could not learn it from any client.
    """

    where: str
    term: int
    pid: int = 0
    end: tuple[int, int] | None = None


def claim(run_dir: Path, least: int) -> int:
    """Claim the next free term that is at least ``least``, and return it.

    Raises:
        OSError: the directory cannot be written.
    """
    term = max(least, election.newest(run_dir) + 1)
    while not election.claim(run_dir, term, str(os.getpid())):
        term += 1
    return term


def is_succeeded(run_dir: Path, term: int) -> bool:
    """Return whether a term later than ``term`` was claimed."""
    return election.newest(run_dir) > term


def read(run_dir: Path) -> LeaseRecord | None:
    """Return the lease record; None if there is none or it cannot be read."""
    try:
        values = json.loads((run_dir / _FILE).read_text())
        end = values.get("end")
        ended = (int(end[0]), int(end[1])) if end is not None else None
        return LeaseRecord(str(values["where"]), int(values["term"]), int(values.get("pid", 0)), ended)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError):
        return None


def write(run_dir: Path, standing: LeaseRecord) -> None:
    """Replace the lease record atomically: readers see the old or the new one, never a part of one.

    Raises:
        OSError: the directory cannot be written.
    """
    temporary = run_dir / f".{_FILE}.{standing.term}.tmp"
    temporary.write_text(json.dumps(asdict(standing)))
    temporary.replace(run_dir / _FILE)
