"""The control plane as a node agent sees it: starts its process, restarts it, and takes it over from lost nodes.

It runs on the node of one agent, as the agent's child. Leadership is divided into numbered terms: an agent claims the
next term, starts the control plane, and the control plane then renews a lease and continues from the journal. A standby
process, which has imported everything, can be prepared so that a later start is fast. What a failure of the control
plane means for this node's workers is passed to the agent as an event.

While a control plane is active, it renews a lease. An agent that gets no answer may wait, take over by starting a new
control plane, or fence (kill) its own workers: :func:`decide`.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ft.base.errors import UserError
from ft.job.agent.console import Console, RecoveryNews, last_lines
from ft.job.agent.uplink import ReportRefused, Uplink
from ft.job.control.state import ControlOptions, ControlStart
from ft.job.control.timeouts import Timeouts
from ft.net.codec import to_json
from ft.platform import election, processes
from ft.platform.election import SUCCEEDED, LeaseKeeper, LeaseRecord
from ft.platform.processes import MOST_IN_A_ROW, OwnPauses, Standstill
from ft.platform.supervisor import Supervisor

WAIT, CLAIM, FENCE, RENEW, GIVE_UP = "wait", "claim", "fence", "renew", "give up"
"""Actions of an agent.

- wait: do nothing.
- claim: claim the next term and start a control plane on this node.
- fence: kill this node's workers.
- renew: kill the control plane that was started on this node and does not get through its startup; start another one.
- give up: end the run on this node.
"""


@dataclass(frozen=True)
class ControlPlaneView:
    """Observations of an agent about the control plane.

    Attributes:
        silent_s: seconds since the control plane last answered this agent.
        lease_s: seconds for which the agent has watched the lease without seeing a renewal; None if the agent sees no
            lease, because it shares no directory with the control plane.
        serving_s: seconds for which the control plane of the current term has accepted connections, None if it does not
            yet.
        turn: number of agents that may claim the next term before this one.
        taken_in: whether the control plane has answered this agent before. If not, this node's workers have no logical
            ranks that could be assigned to other workers, so fencing is not needed.
        idle_s: seconds for which a control plane that is starting up on this node has made no progress; 0 if none is
            starting up here.
        idle_starts: number of control planes in a row that were killed on this node because their startup made no
            progress.
    """

    silent_s: float
    lease_s: float | None
    serving_s: float | None
    turn: int
    taken_in: bool = True
    idle_s: float = 0.0
    idle_starts: int = 0


def decide(view: ControlPlaneView, timeouts: Timeouts) -> tuple[str, str]:
    """Return (action, reason).

    While the lease is being renewed, a control plane is active. An agent that cannot reach it will be declared
    lost, and therefore fences itself: it kills its workers before their logical ranks are assigned to other workers.

    Once the lease has expired, no control plane is active. Training continues, and the agents try in turn to claim
    the next term; the first agent that succeeds starts the new control plane.
    """
    if view.silent_s <= timeouts.contact_s:
        return WAIT, ""
    if view.idle_s > timeouts.stuck_s:
        why = f"the control plane that is to start has done nothing for {view.idle_s:.0f} s"
        if view.idle_starts + 1 >= MOST_IN_A_ROW:
            return GIVE_UP, f"{why}, {MOST_IN_A_ROW} times in a row"
        return RENEW, why
    if view.lease_s is None:
        if view.silent_s > timeouts.away_s:
            return GIVE_UP, f"no control plane for {view.silent_s:.0f} s"
        cut_off = view.silent_s > timeouts.fence_s and view.taken_in
        return (FENCE, "cut off from the control plane, whose lease cannot be seen") if cut_off else (WAIT, "")
    if view.lease_s > timeouts.lease_s + view.turn * timeouts.turn_s:
        return CLAIM, f"the control plane has not renewed its lease for {view.lease_s:.1f} s"
    unheard_s = 0.0 if view.serving_s is None else min(view.silent_s, view.serving_s)
    if view.taken_in and unheard_s > timeouts.fence_s:
        return FENCE, f"cut off for {view.silent_s:.1f} s from a control plane that goes on"
    if not view.taken_in and unheard_s > timeouts.away_s:
        return GIVE_UP, f"the control plane serves, and has not answered this node for {unheard_s:.0f} s"
    return WAIT, ""


_LEAVE_S, _TERM_S = 10.0, 2.0


class SidecarProcess:
    """Starts and ends the control plane's process.

    Args:
        where: address on which the control plane accepts the agents' messages.

    Attributes:
        log: file for the output of the process.
        on_exit: called with the exit code when the control plane's process has ended by itself.
    """

    def __init__(self, supervisor: Supervisor, run_dir: Path, where: str, options: ControlOptions):
        self._supervisor = supervisor
        self._given = ControlStart(str(run_dir), where, options)
        self.log = run_dir / "logs" / "control.log"
        self.on_exit: Callable[[int], None] = lambda code: None
        self._process: subprocess.Popen[bytes] | None = None
        self._spare: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Return the pid of the process, -1 if there is none."""
        return self._process.pid if self._process is not None else -1

    def prepare(self) -> None:
        """Start a standby process, if there is none: a takeover must not wait for imports, which take seconds."""
        if self._spare is None:
            self._spare = self._launch()

    def start(self, term: int, node: str, restarts: int) -> None:
        """Start the control plane."""
        options = replace(self._given.options, restarts=restarts)
        given = to_json(replace(self._given, options=options, node=node, term=term))
        self._process = self._spare or self._launch()
        self._spare = None
        threading.Thread(target=_tell, args=(self._process, json.dumps(given)), daemon=True).start()

    def _launch(self) -> subprocess.Popen[bytes]:
        child = self._supervisor.start(
            "ft.job.control.sidecar",
            [],
            self.log,
            lambda code: self._ended(child, code),
            environment={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
        )
        return child

    def _ended(self, child: subprocess.Popen[bytes], code: int) -> None:
        if child is self._spare:
            self._spare = None
        elif child is self._process:
            self._process = None
            self.on_exit(code)

    def end(self) -> None:
        """Wait for the control plane's process to end, and terminate it if it does not.

        The process exits by itself once all agents have announced that they leave; until then agents of other nodes
        still read from it. After ``_LEAVE_S`` seconds this method sends SIGTERM, and ``_TERM_S`` seconds later SIGKILL.
        """
        if self._spare is not None and self._spare.stdin is not None:
            self._spare.stdin.close()
        if self.pid < 0:
            return
        for signum, patience_s in ((0, _LEAVE_S), (signal.SIGTERM, _TERM_S)):
            processes.send(self.pid, signum)
            if self.ends_within(patience_s):
                return
        processes.send(self.pid, signal.SIGKILL)

    def ends_within(self, patience_s: float) -> bool:
        """Wait for the process to end, without reaping it. Return whether it has ended."""
        deadline = time.monotonic() + patience_s
        while self.pid >= 0 and processes.state(self.pid) not in "ZX":
            if time.monotonic() > deadline:
                return False
            time.sleep(0.005)
        return True

    def kill(self) -> None:
        """Kill and reap the process, if there is one, so that its address is free for the next process."""
        if self._process is not None:
            self._supervisor.end(self._process)
            self._process = None


def _tell(process: subprocess.Popen[bytes], text: str) -> None:
    """Write what the process is to do, ``text``, to its standard input.

    Runs in a thread, because the text may exceed the pipe's buffer and the process reads it only after its imports.
    """
    # if the process has died, its exit code is handled elsewhere
    assert process.stdin is not None, "it was started with a pipe"
    with contextlib.suppress(OSError), process.stdin as line:
        line.write(text.encode())


_MOST_DEATHS, _WINDOW_S = 3, 60.0
"""Maximum number of deaths of the control plane within ``_WINDOW_S`` seconds.

More deaths suggest that the journal is the cause. The run then restarts from the checkpoint without that journal.
"""

_PREPARE_S = 20.0
"""Seconds after the agent's start at which it starts a standby process for the control plane, ready to take over."""


_WATCH_S = 0.1
"""Longest time between two calls of ``look`` that the agent intends, in seconds."""
_RETRY_S = 1.0
"""Pause in seconds before the start of a control plane is tried again that was not possible."""


@dataclass(frozen=True)
class Fenced:
    """Event: this node is cut off from a control plane that continues on another node, so this node's workers have to
    end.
    """

    reason: str


@dataclass(frozen=True)
class JournalBroken:
    """Event: control planes that read the run's journal die repeatedly; the run has to continue without it."""

    reason: str


class ControlPlaneSupervisor:
    """Claims terms in the leader election, runs the control plane on this node during them, and sees that it answers.

    Args:
        sidecar: the control plane's process, not started yet.
        recoveries: prints the summaries of recoveries, on a node that takes the control plane over too.
        obey: called with the events ``ReportRefused``, ``Fenced`` and ``JournalBroken``.
    """

    def __init__(
        self,
        run_dir: Path,
        node_rank: int,
        sidecar: SidecarProcess,
        timeouts: Timeouts,
        uplink: Uplink,
        console: Console,
        recoveries: RecoveryNews,
        obey: Callable[[Any], None],
    ):
        self._run_dir, self._node_rank, self._timeouts = run_dir, node_rank, timeouts
        self._uplink, self._console, self._recoveries, self._obey = uplink, console, recoveries, obey
        self._lease: LeaseKeeper | None = None
        self._deaths: deque[float] = deque(maxlen=_MOST_DEATHS + 1)
        self._life = self._life_of_deaths = 0
        self._node, self._since = "", time.monotonic()
        self._record: LeaseRecord | None = None
        self._began_at: float | None = None
        self._standstill, self._idle_starts = Standstill(), 0
        self._is_over = self._is_held_up = False
        self._retry_at = 0.0
        self._pauses = OwnPauses(_WATCH_S)
        self._sidecar = sidecar
        sidecar.on_exit = self._ended

    @property
    def is_here(self) -> bool:
        """Return whether the control plane runs on this agent's node."""
        return self._sidecar.pid >= 0

    def settle(self, life: int, node: str) -> None:
        """Record the number of the run's present life, and the agent's present name."""
        self._life, self._node = life, node

    def start(self) -> bool:
        """Claim the next term and start the control plane for it. Return False if another agent has claimed it first.

        Raises:
            OSError: the run's directory cannot be written, or no process can be created; the same call can be made
                again.
        """
        life, node, term = self._life, self._node, election.newest(self._run_dir) + 1
        if not election.claim(self._run_dir, term, node):
            return False
        self._sidecar.kill()
        launcher = processes.identity(os.getpid())
        record = LeaseRecord(term, life, "", node, os.getpid(), launcher=launcher)
        if self._lease is not None:
            self._lease.hold(record)
        else:
            election.renew(self._run_dir, record)
        if life != self._life_of_deaths:
            self._deaths.clear()
        self._life_of_deaths, self._record, self._standstill = life, record, Standstill()
        try:
            self._sidecar.start(term, node, life)
        except OSError:
            if self._lease is not None:
                self._lease.drop()
            raise
        return True

    def _try_start(self) -> bool:
        """Start the control plane here if that is possible now; return whether it was started.

        A full disk is said once; the workers train on, and ``look`` tries again.
        """
        if (now := time.monotonic()) < self._retry_at:
            return False
        try:
            started, self._is_held_up = self.start(), False
        except OSError as error:
            self._retry_at, started = now + _RETRY_S, False
            if not self._is_held_up:
                self._console.complain(f"no control plane can be started here: {error}; it is tried again until it can")
            self._is_held_up = True
        return started

    def look(self, now: float) -> None:
        """If the control plane does not answer, wait, take over or fence. ``now``: monotonic time in seconds."""
        if self._is_over:
            return
        self._pauses.look(now)
        self._uplink.check_contact(now, self._pauses)
        contact_at = self._uplink.contact_at
        what, why = self.decide(now, contact_at, self._pauses.since(contact_at))
        if what == RENEW:
            self._console.complain(f"{why} ({processes.describe(self._sidecar.pid)}): it is killed")
            self._try_start()
        elif what == CLAIM and self._try_start():
            self._console.say(f"{why}; {self._node} ({socket.gethostname()}) takes over, training goes on")
            self._recoveries.adopt(self._run_dir / "events.jsonl")
        elif what == FENCE:
            self._obey(Fenced(why))
        elif what == GIVE_UP:
            self._obey(ReportRefused(why))

    def finish(self) -> None:
        """Start no other control plane from now on."""
        self._is_over = True

    def decide(self, now: float, contact_at: float, paused_s: float = 0.0) -> tuple[str, str]:
        """Return the (action, reason) of ``decide``: whether this agent waits, takes over or fences its
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
                self._sidecar.prepare()
            return WAIT, ""
        if self._lease is None:
            # imports take longer than a lease lasts: until the control plane serves, its lease is renewed for it
            mine = self._record if self.is_here else None
            self._lease = LeaseKeeper(self._run_dir, self._timeouts.lease_beat_s, mine)
            self._lease.start()
        # the silence may only be a pause of this event loop: read the lease before deciding
        if not self._lease.has_looked:
            return WAIT, ""
        view = ControlPlaneView(
            silent_s=silent_s,
            lease_s=self._lease.age(now) if self._lease.seen is not None else None,
            serving_s=self._lease.serving(now),
            turn=0 if self.is_here else self._node_rank + 1,
            taken_in=contact_at != self._began_at,
            idle_s=self._idle(now),
            idle_starts=self._idle_starts,
        )
        found = decide(view, self._timeouts)
        self._idle_starts += found[0] == RENEW
        return found

    def _idle(self, now: float) -> float:
        """Return the seconds for which the control plane that is starting on this node has made no progress."""
        if not self.is_here or self._lease is None or not self._lease.holds:
            return 0.0
        return self._standstill.look(now, self._sidecar.pid)

    def close(self) -> None:
        """Wait for the control plane's process to end, if it runs here."""
        self._end_watch()
        self._sidecar.end()

    def _end_watch(self) -> None:
        if self._lease is not None:
            self._lease.close()
            self._lease = None

    def _ended(self, code: int) -> None:
        if self._lease is not None:
            self._lease.drop()
        if code == SUCCEEDED:  # another control plane has replaced it
            return
        self._deaths.append(time.monotonic())
        if self._is_over:
            return
        how = f"the control plane {processes.how_it_ended(code)}"
        lines = [f"    {line}" for line in last_lines(self._sidecar.log)]
        if code == UserError.exit_code:
            self._obey(ReportRefused("\n".join([how, *lines])))
        elif self._dies_again_and_again():
            self._obey(JournalBroken("\n".join([f"{how}, again and again", *lines])))
        elif self._try_start():
            self._console.say(f"{how}; another one takes over from its journal, training goes on")

    def _dies_again_and_again(self) -> bool:
        """Return whether the control plane has died so often that its journal may be the cause."""
        return len(self._deaths) > _MOST_DEATHS and time.monotonic() - self._deaths[0] < _WINDOW_S
