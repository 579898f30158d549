"""What the launcher reads in the run's folder, in a thread: its loop never waits for a file system."""

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ft.job.control.state import GATHERING
from ft.job.replicas.marks import Marks, read
from ft.record.run import read_status

_PERIOD_S = 0.3


@dataclass(frozen=True)
class Seen:
    """What was last seen.

    Attributes:
        marks: of the run. phases: replica -> its control plane's phase, "" before there is one. restarts: replica ->
            warm restarts inside it.
    """

    marks: Marks = field(default_factory=Marks)
    phases: Mapping[int, str] = field(default_factory=dict)
    restarts: Mapping[int, int] = field(default_factory=dict)

    def trains(self, replica: int) -> bool:
        return self.phases.get(replica, "") not in ("", GATHERING)


class Watch:
    """Looks again and again.

    Args:
        run_dir: the run's. folders: replica -> its folder, for those to look at.

    Attributes:
        seen: what is known.
    """

    def __init__(self, run_dir: Path, folders: Mapping[int, Path]):
        self._run_dir, self._folders = run_dir, folders
        self._closed = threading.Event()
        self.seen = Seen()

    def start(self) -> None:
        threading.Thread(target=self._run, name="ft-watch", daemon=True).start()

    def look(self) -> Seen:
        """Looks now."""
        found = {replica: read_status(folder) for replica, folder in self._folders.items()}
        phases = {replica: str(status.get("phase", "")) for replica, status in found.items()}
        restarts = {replica: _whole(status.get("restarts")) for replica, status in found.items()}
        self.seen = Seen(read(self._run_dir), phases, restarts)
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
