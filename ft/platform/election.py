"""Leader election for the control plane of an ``ft run``, through files in the run's directory.

The control plane is one process for the whole run, which decides about recoveries. Leadership is divided into numbered
terms. A node claims a term by creating a file, which can succeed only once. The holder of the newest claim renews its
lease in ``control.json``. A holder that finds a newer claim than its own has been replaced, and stops taking decisions.
Other processes detect a live leader by watching the renewal count in the lease, so that clocks of different hosts are
never compared.
"""

import json
import os
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path

_FOLDER, _FILE = "terms", "control.json"
_LOOK_S = 0.05
SUCCEEDED = 75
"""Exit code of a control plane that found a newer claim than its own."""


@dataclass(frozen=True)
class LeaseRecord:
    """The lease: the content of ``control.json``.

    Attributes:
        term: number of the term.
        life: number of the restart with which the present journal (the control plane's log of decisions) began; 0 for
            the first start of the run.
        where: address at which the control plane accepts messages, "" until it accepts them.
        node: name of the node agent whose child the control plane is.
        pid: pid of the control plane's process on that node.
        count: number of renewals.
        launcher: the process that restarts the control plane when it dies, as ``processes.identity`` returns it; "" in
            files of earlier versions.
    """

    term: int
    life: int
    where: str
    node: str
    pid: int
    count: int = 0
    launcher: str = ""


def claim(run_dir: Path, term: int, node: str) -> bool:
    """Claim ``term`` for the control plane of ``node``. Return False if another node has claimed it already."""
    folder = run_dir / _FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    try:
        descriptor = os.open(folder / str(term), os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
    except FileExistsError:
        return False
    with os.fdopen(descriptor, "w") as file:
        file.write(node)
    return True


def newest(run_dir: Path) -> int:
    """Return the newest term that was claimed, -1 before the first."""
    try:
        return max((int(name) for name in os.listdir(run_dir / _FOLDER) if name.isdecimal()), default=-1)
    except FileNotFoundError:
        return -1


def is_over(run_dir: Path, term: int) -> bool:
    """Return whether the next term after ``term`` was claimed.

    This checks a single file, because the control plane calls it before every order.
    """
    return os.path.exists(run_dir / _FOLDER / str(term + 1))


def read(run_dir: Path) -> LeaseRecord | None:
    """Return the lease, None if there is none or it cannot be read."""
    try:
        values = json.loads((run_dir / _FILE).read_text())
        return LeaseRecord(**{f.name: values[f.name] for f in fields(LeaseRecord) if f.name in values})
    except (OSError, ValueError, KeyError, TypeError):
        return None


def renew(run_dir: Path, standing: LeaseRecord) -> None:
    """Write ``control.json`` atomically: readers see the old or the new content.

    Raises:
        OSError: the directory cannot be written.
    """
    temporary = run_dir / f".{_FILE}.{standing.term}.tmp"
    temporary.write_text(json.dumps(asdict(standing)))
    temporary.replace(run_dir / _FILE)


def is_kept(run_dir: Path, patience_s: float = 2.0) -> bool:
    """Return whether a control plane is active: wait at most ``patience_s`` seconds for a renewal of the lease."""
    first = read(run_dir)
    deadline = time.monotonic() + patience_s
    while first is not None and time.monotonic() < deadline:
        if read(run_dir) != first:
            return True
        time.sleep(_LOOK_S)
    return False
