"""Standby nodes that take the places of lost nodes, in any replica of the run.

A place is a node's index in the run (its node rank), with the parts of replicas that belong to it. The launcher of a
node holds the lease of its place. A standby node first serves the replica that it is a part of, whose control plane
gives its workers the logical ranks of a lost node. When another replica cannot train because the launcher of one of its
nodes is lost, a standby node that is not needed claims that node's place, and its launcher starts the agents of that
place instead of its own.
"""

import contextlib
import os
import threading
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ft.base.errors import UserError
from ft.job.control.state import ENDED, GATHERING
from ft.job.replicas import marks
from ft.job.replicas.host import FOLDER
from ft.job.replicas.places import LauncherPart
from ft.platform import election, processes
from ft.platform.election import LeaseKeeper, LeaseRecord
from ft.platform.processes import OwnPauses
from ft.record.run import read_status

_BEAT_S = 0.5
"""Interval in seconds between renewals of the lease of a place."""
LOST_S = 5.0
"""A launcher that has not renewed the lease of its place for so many seconds is lost."""
IDLE_S = 3.0
"""A lost node is replaced when its replicas have not trained for so many seconds: until then, they may recover by
themselves.
"""
_POLL_S = 1.0


@dataclass(frozen=True)
class Observed:
    """What a standby node observes of one place.

    Attributes:
        silent_s: seconds since its lease was last seen to be renewed; None if nobody has ever held it.
        idle_s: replica -> seconds for which it has not trained, 0 while it trains; for the replicas of this place.
    """

    silent_s: float | None
    idle_s: Mapping[int, float]


def choose(places: Mapping[int, Observed], ended: Collection[int], mine: int) -> int | None:
    """Return the place that a standby node takes, None if none needs it.

    Args:
        places: all other places of the run.
        ended: replicas that have finished or were given up; nobody takes their places.
        mine: number of the standby node's own place. It decides which of several places is taken, so that not all
            standby nodes try the same one.
    """
    vacant = [
        place
        for place, seen in places.items()
        if seen.silent_s is not None
        and seen.silent_s > LOST_S
        and not set(seen.idle_s) & set(ended)
        and min(seen.idle_s.values()) > IDLE_S
    ]
    return vacant[mine % len(vacant)] if vacant else None


class Lookout:
    """Watches the places of the run for a standby node, in a thread: the launcher never waits for a file system.

    Args:
        mine: the standby node's parts of its own replicas.
        place: the standby node's own place.
        replicas_of: place -> its replicas, for all other places of the run.

    Attributes:
        choice: the place to take, None if there is none or this node's workers are in use.
    """

    def __init__(self, run_dir: Path, mine: list[LauncherPart], place: int, replicas_of: Mapping[int, list[int]]):
        self._run_dir, self._mine, self._place, self._replicas_of = run_dir, mine, place, replicas_of
        self._leases: dict[int, tuple[LeaseRecord, float]] = {}
        self._controls: dict[int, tuple[LeaseRecord | None, float]] = {}
        self._idle_since: dict[int, float] = {}
        self._pauses = OwnPauses(_POLL_S)
        self._closed = threading.Event()
        self.choice: int | None = None

    def start(self) -> None:
        threading.Thread(target=self._run, name="ft-lookout", daemon=True).start()

    def close(self) -> None:
        self._closed.set()

    def look(self, now: float) -> int | None:
        """Read the state of the run at time ``now`` (monotonic, in seconds), and return the number of the place that
        this node is to take; None if there is none.

        Raises:
            OSError: a file cannot be read.
        """
        self._pauses.look(now)  # its launcher is paused together with all others if the job is suspended
        ended = marks.read(self._run_dir)
        if ended.finished or any(self._is_used(part) for part in self._mine):
            return None
        observed = {}
        for place, replicas in self._replicas_of.items():
            silent_s = self._silent(place, now)
            is_late = silent_s is not None and silent_s > LOST_S / 2
            # the replicas of a living node are not read: they are many
            observed[place] = Observed(silent_s, {r: self._idle(r, now) if is_late else 0.0 for r in replicas})
        return choose(observed, ended.given_up, self._place)

    def _silent(self, place: int, now: float) -> float | None:
        found, known = election.read(folder_of(self._run_dir, place)), self._leases.get(place)
        if found is not None and (known is None or known[0] != found):
            known = self._leases[place] = found, now
        return None if known is None else self._pauses.between(known[1], now)

    def _idle(self, replica: int, now: float) -> float:
        """Return for how long a replica has not trained: it lacks workers, or its control plane is gone."""
        folder = self._run_dir / f"replica-{replica}"
        control, known = election.read(folder), self._controls.get(replica)
        if known is None or known[0] != control:
            known = self._controls[replica] = control, now
        if _trains(read_status(folder)) and self._pauses.between(known[1], now) < LOST_S:
            self._idle_since.pop(replica, None)
            return 0.0
        return self._pauses.between(self._idle_since.setdefault(replica, now), now)

    def _is_used(self, part: LauncherPart) -> bool:
        """Return whether workers of this node hold logical ranks of a replica that trains."""
        status = read_status(self._run_dir / f"replica-{part.replica}")
        seats = status.get("seats")
        nodes = {seat.get("node", "") for seat in seats.values()} if isinstance(seats, dict) else set()
        return _trains(status) and any(node.partition("-")[0] == f"n{part.node_rank}" for node in nodes)

    def _run(self) -> None:
        while not self._closed.wait(_POLL_S):
            with contextlib.suppress(OSError):
                self.choice = self.look(time.monotonic())


class LauncherPlace:
    """The place of this launcher, and its lease.

    Args:
        lookout: watches the other places; None for a node that is no standby node.
    """

    def __init__(self, run_dir: Path, name: str, number: int, lookout: Lookout | None = None):
        self._run_dir, self._name, self.number, self._lookout = run_dir, name, number, lookout
        self._keeper: LeaseKeeper | None = None

    def begin(self) -> None:
        """Claim the place for this launcher, and renew its lease from then on; on a standby node, watch the others.

        Raises:
            UserError: another launcher holds the place, or the run's folder cannot be written.
        """
        folder = folder_of(self._run_dir, self.number)
        if election.is_kept(folder, 4 * _BEAT_S):
            holder = election.read(folder)
            raise UserError(
                f"the place of node {self.number} is held by {holder.node if holder else 'another launcher'}",
                "start ft run with the --node-rank of a node that is lost; ft status shows the nodes",
            )
        try:
            self._hold(election.claim_next(folder, self._name))
        except OSError as error:
            problem = f"the place of node {self.number} cannot be claimed in {folder}: {error.strerror}"
            raise UserError(problem, "choose --run-dir") from error
        if self._lookout is not None:
            self._lookout.start()

    def take(self) -> bool:
        """Take the place of a lost node if one needs it; return whether this is the launcher of another place now.

        Raises:
            OSError: the folder cannot be written.
        """
        if self._lookout is None or self._lookout.choice is None or not self.move(self._lookout.choice):
            return False
        self._lookout.close()
        self._lookout = None
        return True

    def move(self, number: int) -> bool:
        """Take another place, and leave this one. Return False if another launcher was faster.

        Raises:
            OSError: the folder cannot be written.
        """
        folder = folder_of(self._run_dir, number)
        term = election.newest(folder) + 1
        if not election.claim(folder, term, self._name):
            return False
        if self._keeper is not None:
            self._keeper.close()
        self.number = number
        self._hold(term)
        return True

    @property
    def is_lost(self) -> bool:
        """Return whether another launcher has taken the place, because this one seemed to be dead."""
        return self._keeper is not None and self._keeper.lost

    def close(self) -> None:
        """Stop renewing the lease, and watching the others."""
        for one in (self._keeper, self._lookout):
            if one is not None:
                one.close()

    def _hold(self, term: int) -> None:
        folder, pid = folder_of(self._run_dir, self.number), os.getpid()
        self._keeper = LeaseKeeper(folder, _BEAT_S)
        self._keeper.hold(LeaseRecord(term, 0, "", self._name, pid, launcher=processes.identity(pid)))
        self._keeper.start()


def folder_of(run_dir: Path, place: int) -> Path:
    """Return the folder of the lease of a place."""
    return run_dir / FOLDER / f"place-{place}"


def _trains(status: Mapping[str, Any]) -> bool:
    return status.get("phase", "") not in ("", GATHERING, ENDED)
