"""Supervises the control plane's process from a node agent: starts it, restarts it, and takes it over from lost nodes.

The control plane is one process for the whole run, which decides about recoveries. It runs on the node of one agent
(the supervisor process of a node). Leadership is divided into numbered terms: an agent claims the next term, starts the
control plane, and the control plane then renews a lease. A restarted control plane continues from its journal, the log
of its decisions.
"""

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from ft.job.agent import succession
from ft.job.agent.sidecar import Sidecar
from ft.job.control.timeouts import Timeouts
from ft.platform import election as election
from ft.platform import processes
from ft.platform.election import SUCCEEDED, LeaseRecord
from ft.platform.standstill import Standstill

_MOST_DEATHS, _WINDOW_S = 3, 60.0
"""Maximum number of deaths of the control plane within ``_WINDOW_S`` seconds.

More deaths suggest that the journal is the cause. The run then restarts from the checkpoint without that journal.
"""

_PREPARE_S = 20.0
"""Seconds after the agent's start at which it starts a standby process for the control plane, ready to take over."""


class ControlPlaneSupervisor:
    """Claims terms in the leader election, and runs the control plane's process on this node during these terms.

    Args:
        run_dir: the run's directory.
        node_rank: number of this agent's node; lower numbers claim a free term earlier.
        sidecar: the control plane's process, not started yet.
        timeouts: limits in seconds.
    """

    def __init__(self, run_dir: Path, node_rank: int, sidecar: Sidecar, timeouts: Timeouts):
        self._run_dir, self._node_rank, self._timeouts = run_dir, node_rank, timeouts
        self._watch: _Watch | None = None
        self._deaths: deque[float] = deque(maxlen=_MOST_DEATHS + 1)
        self._life, self._term, self._since = 0, -1, time.monotonic()
        self._began_at: float | None = None
        self._standstill, self._idle_starts = Standstill(), 0
        self.sidecar = sidecar

    @property
    def hosts(self) -> bool:
        """Whether the control plane runs on this agent's node."""
        return self.sidecar.pid >= 0

    @property
    def events(self) -> Path:
        """The event log of the run, which the control plane writes."""
        return self._run_dir / "events.jsonl"

    def start(self, life: int, node: str) -> bool:
        """Claim the next term and start the control plane for it. Return False if another agent has claimed it first.

        Args:
            life: number of the warm restart at which the run's present journal began, 0 for the first.
            node: name of this agent.

        Raises:
            OSError: the run's directory cannot be written.
        """
        term = election.newest(self._run_dir) + 1
        if not election.claim(self._run_dir, term, node):
            return False
        if life != self._life:
            self._deaths.clear()
        self._life, self._term, self._standstill = life, term, Standstill()
        self.sidecar.kill()
        launcher = processes.identity(os.getpid())
        election.renew(self._run_dir, LeaseRecord(term, life, "", node, os.getpid(), launcher=launcher))
        self.sidecar.start(term, node, life)
        if self._watch is not None:
            self._watch.claimed()
        return True

    def is_replaced(self, code: int) -> bool:
        """Record the exit of the control plane's process, and return whether another control plane has replaced it."""
        if code != SUCCEEDED:
            self._deaths.append(time.monotonic())
        return code == SUCCEEDED

    def dies_again_and_again(self) -> bool:
        """Return whether the control plane has died so often that its journal may be the cause."""
        return len(self._deaths) > _MOST_DEATHS and time.monotonic() - self._deaths[0] < _WINDOW_S

    def look(self, now: float, contact_at: float) -> tuple[str, str]:
        """Return (action, reason): what this agent does about the control plane now, by ``succession.decide``.

        The lease is watched only while the control plane does not answer this agent.

        Args:
            now: monotonic time, in seconds.
            contact_at: monotonic time at which the control plane last answered; before its first answer, the time at
                which this agent started to connect.
        """
        self._began_at = contact_at if self._began_at is None else self._began_at
        silent_s = now - contact_at
        if silent_s < self._timeouts.quorum_s:
            self._end_watch()
            self._idle_starts = 0
            if now - self._since > _PREPARE_S:
                self.sidecar.prepare()
            return succession.WAIT, ""
        if self._watch is None:
            self._watch = _Watch(self._run_dir, self._timeouts.lease_beat_s, lambda: self._term if self.hosts else -1)
        # the silence may only be a pause of this event loop: read the lease before deciding
        if not self._watch.has_looked:
            return succession.WAIT, ""
        view = succession.View(
            silent_s=silent_s,
            lease_s=self._watch.age(now),
            serving_s=self._watch.serving(now),
            turn=0 if self.hosts else self._node_rank + 1,
            taken_in=contact_at != self._began_at,
            idle_s=self._idle(now),
            idle_starts=self._idle_starts,
        )
        found = succession.decide(view, self._timeouts)
        self._idle_starts += found[0] == succession.RENEW
        return found

    def _idle(self, now: float) -> float:
        """Return the seconds for which the control plane that is starting on this node has made no progress."""
        if not self.hosts or not self._watch.is_starting:
            return 0.0
        return self._standstill.look(now, self.sidecar.pid)

    def close(self) -> None:
        self._end_watch()
        self.sidecar.end()

    def _end_watch(self) -> None:
        if self._watch is not None:
            self._watch.close()
            self._watch = None


class _Watch:
    """Watches the lease file in a thread, so that the agent's event loop never waits for a file system.

    Args:
        run_dir: the run's directory.
        period_s: seconds between two reads of the lease.
        starting: returns the term of the control plane on this node, or -1 if there is none. Until that control plane
            accepts connections, this thread renews its lease, because its imports take longer than a lease lasts.

    Attributes:
        has_looked: whether the lease was read at least once.
    """

    def __init__(self, run_dir: Path, period_s: float, starting: Callable[[], int]):
        self._run_dir, self._period_s, self._starting = run_dir, period_s, starting
        self._standing: LeaseRecord | None = None
        self.has_looked = False
        self._changed_at = self._serves_since = time.monotonic()
        self._closed = threading.Event()
        threading.Thread(target=self._run, name="ft-lease", daemon=True).start()

    def claimed(self) -> None:
        """Record that this agent has just renewed the lease, so that it does not claim again before the next read."""
        self._changed_at = time.monotonic()

    def age(self, now: float) -> float | None:
        """Return the seconds since the lease was last renewed, None if there is no lease."""
        return now - self._changed_at if self._standing is not None else None

    @property
    def is_starting(self) -> bool:
        """Whether the newest term belongs to a control plane on this node that does not accept connections yet."""
        return self._standing is not None and not self._standing.where and self._standing.term == self._starting()

    def serving(self, now: float) -> float | None:
        """Return the seconds since the control plane of the newest term was first seen to accept connections.

        None: it does not accept connections yet.
        """
        return now - self._serves_since if self._standing is not None and self._standing.where else None

    def close(self) -> None:
        self._closed.set()

    def _run(self) -> None:
        while not self._closed.is_set():
            found, now, last = election.read(self._run_dir), time.monotonic(), self._standing
            if found is not None and found != last:
                if last is None or found.term != last.term or not last.where:
                    self._serves_since = now
                self._changed_at, self._standing = now, found
            self.has_looked = True
            if self.is_starting:
                with contextlib.suppress(OSError):
                    election.renew(self._run_dir, replace(self._standing, count=self._standing.count + 1))
            self._closed.wait(self._period_s)
