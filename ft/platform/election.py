"""Leader election in the shared state of a run: for the control plane, the quorum server and the launchers.

Leadership is divided into numbered terms. A process claims a term by creating a value, which can succeed only once. The
holder of the newest claim renews its lease, a JSON text. A holder that finds a newer claim than its own has been
replaced, and stops taking decisions. Other processes detect a live leader by watching the renewal count in the lease,
so that clocks of different hosts are never compared. A :class:`Holder` says which ``ft run`` holds something that all
nodes see: the place of a node in a run, a checkpoint folder.
"""

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from ft.base import bounded_json, files
from ft.platform import processes, shared_state
from ft.platform.processes import OwnPauses

CONTROL, QUORUM = "control.json", "quorum.json"
"""Names of leases: CONTROL of the control plane's lease and, in the launchers' own folder, of the lease of the
launcher that runs the quorum server; QUORUM of the quorum server's lease.
"""
LAUNCHERS = "launchers"
"""Subfolder of a run's folder for the launchers' terms and lease; those in the run's folder belong to the servers."""
_FOLDER = "terms"
_POLL_S = 0.05
SUCCEEDED = 75
"""Exit code of a leader that found a newer claim than its own."""


@dataclass(frozen=True)
class LeaseRecord:
    """The lease of a leader.

    Attributes:
        life: number of the restart with which the present journal (the control plane's log of decisions) began; 0 for
            the first start of the run.
        where: address at which the leader accepts messages, "" until it accepts them.
        node: name of the node agent or launcher that the leader is, or whose child it is.
        pid: pid of the leader's process on that node.
        launcher: the process that restarts the leader when it dies, as ``processes.identity`` returns it; "" in leases
            of earlier versions.
        end: the quorum server's (next_step, lineage) of a replica that has done the last step, or None: its number of
            committed steps, and the number of the quorum that committed the last of them. It is stored here because
            that replica leaves, and the next server could not learn it from any client.
    """

    term: int
    life: int
    where: str
    node: str
    pid: int
    count: int = 0
    launcher: str = ""
    end: tuple[int, int] | None = None


def claim(run_dir: Path, term: int, node: str) -> bool:
    """Claim a term; return False if the term was claimed before, by any process.

    Args:
        node: name of the node or process that claims the term, for people.

    Raises:
        OSError: the shared state cannot be written.
    """
    return shared_state.of(run_dir).create(f"{_FOLDER}/{term}", node.encode())


def claim_next(run_dir: Path, node: str, least: int = 0) -> int:
    """Claim the first term that is free, and return its number.

    Args:
        least: lower bound of the term.

    Raises:
        OSError: the directory cannot be written.
    """
    term = max(least, newest(run_dir) + 1)
    while not claim(run_dir, term, node):
        term += 1
    return term


def newest(run_dir: Path) -> int:
    """Return the number of the newest term that was claimed; -1 if none was.

    Raises:
        OSError: the shared state cannot be read.
    """
    return max((int(name) for name in shared_state.of(run_dir).names(_FOLDER) if name.isdecimal()), default=-1)


def is_over(run_dir: Path, term: int) -> bool:
    """Return whether another process has claimed a later term than ``term``, as far as the shared state can be read."""
    with contextlib.suppress(OSError):
        return newest(run_dir) > term
    return False


def read(run_dir: Path, file: str = CONTROL) -> LeaseRecord | None:
    """Return the lease in ``file`` (CONTROL or QUORUM); None if there is none or it cannot be read."""
    try:
        values = bounded_json.loads(shared_state.of(run_dir).get(file) or b"")
        found = LeaseRecord(**{f.name: values[f.name] for f in fields(LeaseRecord) if f.name in values})
        return found if found.end is None else replace(found, end=(int(found.end[0]), int(found.end[1])))
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return None


def renew(run_dir: Path, standing: LeaseRecord, file: str = CONTROL) -> None:
    """Write the lease atomically: readers see the old or the new content.

    Raises:
        OSError: the shared state cannot be written.
    """
    shared_state.of(run_dir).put(file, json.dumps(asdict(standing)).encode())


def is_kept(run_dir: Path, patience_s: float = 2.0) -> bool:
    """Return whether a leader is active: wait at most ``patience_s`` seconds for a renewal of the lease."""
    first = read(run_dir)
    deadline = time.monotonic() + patience_s
    while first is not None and time.monotonic() < deadline:
        if read(run_dir) != first:
            return True
        time.sleep(_POLL_S)
    return False


class LeaseKeeper:
    """Watches a lease, and renews it while this process holds it, in a thread: no event loop waits for a file system.

    A process can hold the lease for a child that is starting. Once the child has written the address at which it
    accepts connections, it renews the lease itself, and this keeper only watches.

    Args:
        period_s: seconds between two readings of the lease.
        mine: lease to renew from the first reading on, unless its leader accepts connections by then.

    Attributes:
        has_looked: whether the lease was read at least once.
        seen: the lease at the last reading, None if there was none.
        lost: whether another process has claimed a later term than the one that this process holds.
    """

    def __init__(self, folder: Path, period_s: float, mine: LeaseRecord | None = None):
        self._folder, self._period_s, self._mine = folder, period_s, mine
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._changed_at: float | None = None
        self._serves_since = self._looked_at = 0.0
        self._pauses = OwnPauses(period_s)
        self.has_looked = False
        self.seen: LeaseRecord | None = None
        self.lost = False

    @property
    def holds(self) -> bool:
        """Return whether this process renews the lease."""
        return self._mine is not None and not self.lost

    def start(self) -> None:
        """Start the thread."""
        threading.Thread(target=self._run, name="ft-lease", daemon=True).start()

    def hold(self, record: LeaseRecord) -> None:
        """Renew the lease from now on, as ``record``, whose term this process has claimed.

        Raises:
            OSError: the folder cannot be written.
        """
        with self._lock:
            renew(self._folder, record)
            self._mine, self.seen, self.lost, self._changed_at = record, record, False, time.monotonic()
            self._looked_at = self._changed_at

    def drop(self) -> None:
        """Stop renewing the lease."""
        with self._lock:
            self._mine, self.lost, self._changed_at = None, False, time.monotonic()
            self._looked_at = self._changed_at

    def age(self, now: float) -> float | None:
        """Return for how many seconds the lease was watched without a change; None before the first reading.

        Time in which the thread did not look does not count.

        Args:
            now: monotonic time, in seconds.
        """
        watched = min(now, self._looked_at + self._period_s)
        return None if self._changed_at is None else max(0.0, watched - self._changed_at)

    def serving(self, now: float) -> float | None:
        """Return the seconds since the leader of the newest term was first seen to accept connections.

        None: it does not accept connections yet.
        """
        return now - self._serves_since if self.seen is not None and self.seen.where else None

    def close(self) -> None:
        """End the thread."""
        self._closed.set()

    def _run(self) -> None:
        while not self._closed.is_set():
            with self._lock, contextlib.suppress(OSError):
                self._look()
            self._closed.wait(self._period_s)

    def _look(self) -> None:
        found, last, now = read(self._folder), self.seen, time.monotonic()
        if (paused_s := self._pauses.look(now)) and self._changed_at is not None:
            self._changed_at += paused_s
            self._serves_since += paused_s
        self._looked_at = now
        if self._changed_at is None or (found is not None and found != last):
            if last is None or found is None or found.term != last.term or not last.where:
                self._serves_since = now
            self._changed_at, self.seen = now, found
        self.has_looked = True
        if self._mine is None:
            return
        if is_over(self._folder, self._mine.term):
            self.lost = True
        elif found is not None and found.term == self._mine.term and found.where:
            self._mine = None
        else:
            self._mine = replace(self._mine, count=self._mine.count + 1)
            renew(self._folder, self._mine)


@dataclass(frozen=True)
class Holder:
    """A process that holds something.

    Attributes:
        since: wall-clock time since which it holds it, in seconds.
        process: the process as ``processes.identity`` returns it.
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


def read_holder(path: Path) -> Holder | None:
    """Return the holder in a file, None if there is no such file or it does not say."""
    try:
        return decode_holder(files.read(path))
    except OSError:
        return None


def decode_holder(data: bytes) -> Holder | None:
    """Return the holder that :meth:`Holder.encode` has written; None if ``data`` is something else."""
    try:
        values = bounded_json.loads(data)
        return Holder(**{f.name: f.type(values[f.name]) for f in fields(Holder)})
    except (ValueError, KeyError, TypeError):
        return None


def is_at_work(found: Holder, leases: Iterable[Path]) -> bool:
    """Return whether a holder, or another process that goes on with its run, is alive; may take 2 s for each folder.

    Args:
        leases: folders with the leases of its run.
    """
    return bool(found.lives) or any(map(is_kept, leases))


def write_holder(path: Path, mine: Holder) -> None:
    """Write who holds something in the place of a holder that is not at work.

    Raises:
        OSError: the folder cannot be written.
    """
    files.replace(path, mine.encode())
