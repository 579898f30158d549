"""Thread that reads the state of the run from its folder, so that the launcher's loop never waits for a file system.

The launcher starts the replicas (full copies of the model) of one node; each replica has a control plane of its own.
"""

import threading
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ft.job.control.state import ENDED, GATHERING
from ft.job.replicas.looks import Company
from ft.job.replicas.marks import Marks, read
from ft.record.run import read_status

_PERIOD_S = 0.3


@dataclass(frozen=True)
class Seen:
    """State of the run when it was last read.

    Attributes:
        marks: the marker files of replicas that have finished or were given up.
        phases: replica -> phase of its control plane, "" before there is one.
        restarts: replica -> number of warm restarts inside the replica.
        at: time at which the reading began (monotonic, in seconds).
    """

    marks: Marks = field(default_factory=Marks)
    phases: Mapping[int, str] = field(default_factory=dict)
    restarts: Mapping[int, int] = field(default_factory=dict)
    at: float = 0.0

    def may_run(self, replica: int, since: float) -> bool:
        """Return whether this was read after ``since``, and the present life of ``replica`` had not ended then."""
        return self.at > since and self.phases.get(replica, "") != ENDED

    def trains(self, replica: int) -> bool:
        """Return whether the control plane of ``replica`` exists and has gathered its workers."""
        return self.phases.get(replica, "") not in ("", GATHERING)


class Watch:
    """Reads the state of the run every 0.3 s, in a thread.

    Args:
        run_dir: directory of the run.
        folders: replica -> its folder, for the replicas to watch.
        leads: the replicas whose first node is this one.
        company: gets looks at other replicas when one of these takes a look.

    Attributes:
        seen: the state that was read last.
    """

    def __init__(
        self,
        run_dir: Path,
        folders: Mapping[int, Path],
        leads: Collection[int] = (),
        company: Company | None = None,
    ):
        self._run_dir, self._folders, self._leads, self._company = run_dir, folders, leads, company
        self._closed = threading.Event()
        self.seen = Seen()

    def start(self) -> None:
        threading.Thread(target=self._run, name="ft-watch", daemon=True).start()

    def follow(self, folders: Mapping[int, Path], leads: Collection[int] = ()) -> None:
        """Watch these replicas from now on, instead of those so far."""
        self._folders, self._leads, self.seen = folders, leads, Seen(self.seen.marks)

    def look(self) -> Seen:
        """Read the state now."""
        now = time.monotonic()
        found = {replica: read_status(folder) for replica, folder in self._folders.items()}
        phases = {replica: str(status.get("phase", "")) for replica, status in found.items()}
        restarts = {replica: _whole(status.get("restarts")) for replica, status in found.items()}
        self.seen = Seen(read(self._run_dir), phases, restarts, now)
        if self._company is not None:
            self._company.follow({replica: status.get("look") for replica, status in found.items()}, self._leads)
        return self.seen

    def close(self) -> None:
        self._closed.set()

    def _run(self) -> None:
        while not self._closed.wait(_PERIOD_S):
            try:
                self.look()
            except OSError:
                continue


def _whole(value: object) -> int:
    return value if isinstance(value, int) else 0
