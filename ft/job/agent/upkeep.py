"""Keeps a node agent's helper processes running: the warm pool and, on one node of the run, the control plane.

The agent is the supervisor process of one node of ``ft run``. Workers (training processes) are forked from the warm
pool, a process that has imported everything. The control plane is one process for the whole run, which orders the
recoveries. What a failure of the control plane means for this node's workers is passed to the agent as an event.
"""

import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ft.base.errors import UserError
from ft.job.agent import succession
from ft.job.agent.announcements import RecoveryNews
from ft.job.agent.console import Console, last_lines
from ft.job.agent.control_supervisor import ControlPlaneSupervisor
from ft.job.agent.pool import WarmPool
from ft.job.agent.uplink import Refused, Uplink
from ft.job.agent.workforce import Workforce
from ft.platform import processes
from ft.platform.processes import OwnPauses
from ft.platform.supervisor import Supervisor

_LOOK_S = 0.1
"""Longest time between two looks at the control plane that the agent intends, in seconds."""
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


class PoolUpkeep:
    """Starts the warm pool, restarts it when it dies, kills it when it is stuck, and processes its messages.

    Args:
        supervisor: the agent's event loop.
        pool: the warm pool, not started yet.
        workforce: the workers of this node.
        console: terminal output.
        on_exit: called with (pid, exit code) of each worker that had ended before the pool reported its start.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        pool: WarmPool,
        workforce: Workforce,
        console: Console,
        on_exit: Callable[[int, int], None],
    ):
        self._supervisor, self._pool, self._workforce, self._console = supervisor, pool, workforce, console
        self._on_exit = on_exit
        self._is_over = False

    def start(self) -> None:
        """Start the pool."""
        self._pool.start(self._ended)
        self._supervisor.watch(self._pool.channel, self._hear)

    def look(self, now: float) -> None:
        """Kill the pool if it makes no progress with open requests. ``now``: monotonic time in seconds."""
        if why := self._pool.kill_if_stuck(now):
            self._console.complain(f"{why}: it is killed")

    def finish(self) -> None:
        """Start no other pool from now on."""
        self._is_over = True

    def _ended(self, code: int) -> None:
        """Process the exit of the pool.

        Raises:
            PoolBroken: several pools in a row ended before they forked a worker.
        """
        self._supervisor.unwatch(self._pool.channel)
        if self._is_over:
            self._pool.close()
            return
        # a worker whose start the pool could not report any more
        for pid in self._supervisor.orphans(self._workforce.pids):
            processes.kill_whole([pid])
        self._console.complain(f"the warm pool {processes.how_it_ended(code)}; starting another one")
        self._pool.restart(code, self._ended)
        self._supervisor.watch(self._pool.channel, self._hear)

    def _hear(self) -> None:
        notes = self._workforce.hear_pool()
        if self._pool.channel.gone:
            # the pool's process has closed its socket, and its exit follows
            self._supervisor.unwatch(self._pool.channel)
        for note in notes:
            self._console.complain(note)
        for pid, code in self._workforce.take_early():
            self._on_exit(pid, code)


class ControlPlaneUpkeep:
    """Starts the control plane when it belongs on this node, and watches whether it answers.

    Args:
        control_supervisor: runs the control plane's process.
        uplink: connection to the control plane.
        console: terminal output.
        recoveries: prints the summaries of recoveries, on a node that takes the control plane over too.
        obey: called with the events ``Refused``, ``Fenced`` and ``JournalBroken``.
    """

    def __init__(
        self,
        control_supervisor: ControlPlaneSupervisor,
        uplink: Uplink,
        console: Console,
        recoveries: RecoveryNews,
        obey: Callable[[Any], None],
    ):
        self._control_supervisor, self._uplink = control_supervisor, uplink
        self._console, self._recoveries, self._obey = console, recoveries, obey
        self._life, self._node = 0, ""
        self._is_over = self._is_held_up = False
        self._retry_at = 0.0
        self._pauses = OwnPauses(_LOOK_S)
        control_supervisor.sidecar.on_exit = self._ended

    @property
    def is_here(self) -> bool:
        """Return whether the control plane runs on this node."""
        return self._control_supervisor.hosts

    def settle(self, life: int, node: str) -> None:
        """Record the number of the run's present life, and the agent's present name."""
        self._life, self._node = life, node

    def start(self) -> bool:
        """Start the control plane here. Return False if another agent was faster.

        Raises:
            OSError: the run's directory cannot be written, or no process can be created.
        """
        return self._control_supervisor.start(self._life, self._node)

    def try_start(self) -> bool:
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
        what, why = self._control_supervisor.look(now, contact_at, self._pauses.since(contact_at))
        if what == succession.RENEW:
            self._console.complain(f"{why} ({processes.describe(self._control_supervisor.sidecar.pid)}): it is killed")
            self.try_start()
        elif what == succession.CLAIM and self.try_start():
            self._console.say(f"{why}; {self._node} ({socket.gethostname()}) takes over, training goes on")
            self._recoveries.adopt(self._control_supervisor.events)
        elif what == succession.FENCE:
            self._obey(Fenced(why))
        elif what == succession.GIVE_UP:
            self._obey(Refused(why))

    def finish(self) -> None:
        """Start no other control plane from now on."""
        self._is_over = True

    def close(self) -> None:
        """Wait for the control plane's process to end, if it runs here."""
        self._control_supervisor.close()

    def _ended(self, code: int) -> None:
        if not self._control_supervisor.ended(code) or self._is_over:
            return
        how = f"the control plane {processes.how_it_ended(code)}"
        lines = [f"    {line}" for line in last_lines(self._control_supervisor.sidecar.log)]
        if code == UserError.exit_code:
            self._obey(Refused("\n".join([how, *lines])))
        elif self._control_supervisor.dies_again_and_again():
            self._obey(JournalBroken("\n".join([f"{how}, again and again", *lines])))
        elif self.try_start():
            self._console.say(f"{how}; another one takes over from its journal, training goes on")
