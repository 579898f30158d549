"""Who is the control plane: one process at a time, in terms that are numbered and claimed in the run's directory.

A claim is a file that can be made only once. Who holds the newest claim renews ``control.json``; who finds a newer
claim than his own has been succeeded and stops deciding. Others tell by watching the file whether somebody is at it:
the count in it changes. Clocks of different hosts are never compared.
"""

import json
import os
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path

_FOLDER, _FILE = "terms", "control.json"
_LOOK_S = 0.05
SUCCEEDED = 75
"""Exit code of a control plane that found a later claim than its own."""


@dataclass(frozen=True)
class LeaseRecord:
    """What ``control.json`` says.

    Attributes:
        term: number of the claim. life: how often the run began anew, which no journal outlasts.
        where: its board. node: the agent it runs beside. pid: its process there. count: of renewals.
        launcher: the process that starts another one when this one dies, as ``processes.identity`` has it; "" in
            folders of earlier versions.
    """

    term: int
    life: int
    where: str
    node: str
    pid: int
    count: int = 0
    launcher: str = ""


def claim(run_dir: Path, term: int, node: str) -> bool:
    """Makes ``node`` the one to run the control plane in ``term``; False if another one has claimed it already."""
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
    """The newest term that was claimed, -1 before the first."""
    try:
        return max((int(name) for name in os.listdir(run_dir / _FOLDER) if name.isdecimal()), default=-1)
    except FileNotFoundError:
        return -1


def is_over(run_dir: Path, term: int) -> bool:
    """Whether a later term was claimed. One look at one name: asked before every order."""
    return os.path.exists(run_dir / _FOLDER / str(term + 1))


def read(run_dir: Path) -> LeaseRecord | None:
    """The standing, None where there is none, or none that can be read."""
    try:
        values = json.loads((run_dir / _FILE).read_text())
        return LeaseRecord(**{f.name: values[f.name] for f in fields(LeaseRecord) if f.name in values})
    except (OSError, ValueError, KeyError, TypeError):
        return None


def renew(run_dir: Path, standing: LeaseRecord) -> None:
    """Writes ``control.json``, for whoever reads it the old or the new one, never half of one.

    Raises:
        OSError: the directory cannot be written.
    """
    temporary = run_dir / f".{_FILE}.{standing.term}.tmp"
    temporary.write_text(json.dumps(asdict(standing)))
    temporary.replace(run_dir / _FILE)


def is_kept(run_dir: Path, patience_s: float = 2.0) -> bool:
    """Whether some control plane is at work: watches for a renewal, for ``patience_s`` at most."""
    first = read(run_dir)
    deadline = time.monotonic() + patience_s
    while first is not None and time.monotonic() < deadline:
        if read(run_dir) != first:
            return True
        time.sleep(_LOOK_S)
    return False
