"""Supervises the control plane's process from a node agent: starts it, restarts it, and takes it over from lost nodes.

The control plane is one process for the whole run, which decides about recoveries. It runs on the node of one agent
(the supervisor process of a node). Leadership is divided into numbered terms: an agent claims the next term, starts the
control plane, and the control plane then renews a lease. A restarted control plane continues from its journal, the log
of its decisions.
"""

import os
import time
from collections import deque
from pathlib import Path

from ft.job.agent import succession
from ft.job.agent.sidecar import Sidecar
from ft.job.control.timeouts import Timeouts
from ft.platform import election, processes
from ft.platform.election import SUCCEEDED, LeaseKeeper, LeaseRecord
from ft.platform.processes import Standstill

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
        self._lease: LeaseKeeper | None = None
        self._deaths: deque[float] = deque(maxlen=_MOST_DEATHS + 1)
        self._life, self._since = 0, time.monotonic()
        self._record: LeaseRecord | None = None
        self._began_at: float | None = None
        self._standstill, self._idle_starts = Standstill(), 0
        self.sidecar = sidecar

    @property
    def hosts(self) -> bool:
        """Return whether the control plane runs on this agent's node."""
        return self.sidecar.pid >= 0

    @property
    def events(self) -> Path:
        """Return the path of the run's event log, which the control plane writes."""
        return self._run_dir / "events.jsonl"

    def start(self, life: int, node: str) -> bool:
        """Claim the next term and start the control plane for it. Return False if another agent has claimed it first.

        Args:
            life: number of the warm restart at which the run's present journal began, 0 for the first.
            node: name of this agent.

        Raises:
            OSError: the run's directory cannot be written, or no process can be created; the same call can be made
                again.
        """
        term = election.newest(self._run_dir) + 1
        if not election.claim(self._run_dir, term, node):
            return False
        self.sidecar.kill()
        launcher = processes.identity(os.getpid())
        record = LeaseRecord(term, life, "", node, os.getpid(), launcher=launcher)
        if self._lease is not None:
            self._lease.hold(record)
        else:
            election.renew(self._run_dir, record)
        if life != self._life:
            self._deaths.clear()
        self._life, self._record, self._standstill = life, record, Standstill()
        try:
            self.sidecar.start(term, node, life)
        except OSError:
            if self._lease is not None:
                self._lease.drop()
            raise
        return True

    def ended(self, code: int) -> bool:
        """Record the exit of the control plane's process. Return False if another control plane has replaced it."""
        if self._lease is not None:
            self._lease.drop()
        if code != SUCCEEDED:
            self._deaths.append(time.monotonic())
        return code != SUCCEEDED

    def dies_again_and_again(self) -> bool:
        """Return whether the control plane has died so often that its journal may be the cause."""
        return len(self._deaths) > _MOST_DEATHS and time.monotonic() - self._deaths[0] < _WINDOW_S

    def look(self, now: float, contact_at: float, paused_s: float = 0.0) -> tuple[str, str]:
        """Return the (action, reason) of ``succession.decide``: whether this agent waits, takes over or fences its
        workers.

        The lease is watched only while the control plane does not answer this agent.

        Args:
            now: monotonic time, in seconds.
            contact_at: monotonic time at which the control plane last answered; before its first answer, the time at
                which this agent started to connect.
            paused_s: seconds since then for which this agent was paused itself; they do not count.
        """
        self._began_at = contact_at if self._began_at is None else self._began_at
        silent_s = now - contact_at - paused_s
        if silent_s < self._timeouts.quorum_s:
            self._end_watch()
            self._idle_starts = 0
            if now - self._since > _PREPARE_S:
                self.sidecar.prepare()
            return succession.WAIT, ""
        if self._lease is None:
            # imports take longer than a lease lasts: until the control plane serves, its lease is renewed for it
            mine = self._record if self.hosts else None
            self._lease = LeaseKeeper(self._run_dir, self._timeouts.lease_beat_s, mine)
            self._lease.start()
        # the silence may only be a pause of this event loop: read the lease before deciding
        if not self._lease.has_looked:
            return succession.WAIT, ""
        view = succession.View(
            silent_s=silent_s,
            lease_s=self._lease.age(now) if self._lease.seen is not None else None,
            serving_s=self._lease.serving(now),
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
        if not self.hosts or not self._lease.holds:
            return 0.0
        return self._standstill.look(now, self.sidecar.pid)

    def close(self) -> None:
        self._end_watch()
        self.sidecar.end()

    def _end_watch(self) -> None:
        if self._lease is not None:
            self._lease.close()
            self._lease = None
