"""Records of which ``ft run`` uses something that all nodes share: a node's place in a run, or a checkpoint folder."""

import json
import socket
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from ft.base import bounded_json, files
from ft.platform import election, processes


@dataclass(frozen=True)
class Holder:
    """A process that holds something.

    Attributes:
        host: name of its host.
        pid: its pid there.
        since: wall-clock time since which it holds it, in seconds.
        process: the process as ``processes.identity`` returns it.
        run: directory of its run.
    """

    host: str
    pid: int
    since: float
    process: str
    run: str

    def __str__(self) -> str:
        return f"ft run on {self.host}, pid {self.pid}, since {time.strftime('%F %T', time.localtime(self.since))}"

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @property
    def lives(self) -> bool | None:
        """Return whether the process is alive, None if it belongs to another host."""
        return processes.lives(self.process)


def holder(pid: int, run: Path) -> Holder:
    """Return the holder that the process ``pid`` of this host is from now on, for the run in the folder ``run``."""
    return Holder(socket.gethostname(), pid, time.time(), processes.identity(pid), str(run))


def read(path: Path) -> Holder | None:
    """Return the holder in a file, None if there is no such file or it does not say."""
    try:
        return decode(files.read(path))
    except OSError:
        return None


def decode(data: bytes) -> Holder | None:
    """Return the holder that :meth:`Holder.encode` has written; None if ``data`` is something else."""
    try:
        values = bounded_json.loads(data)
        return Holder(**{f.name: f.type(values[f.name]) for f in fields(Holder)})
    except (ValueError, KeyError, TypeError):
        return None


def is_at_work(found: Holder, leases: Iterable[Path]) -> bool:
    """Return whether a holder, or another process that goes on with its run, is alive; may take 2 s for each folder.

    Args:
        found: the holder.
        leases: folders with the leases of its run.
    """
    return bool(found.lives) or any(map(election.is_kept, leases))


def replace(path: Path, mine: Holder) -> None:
    """Write who holds something in the place of a holder that is not at work.

    Raises:
        OSError: the folder cannot be written.
    """
    files.replace(path, mine.encode())
