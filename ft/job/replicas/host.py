"""Host of the quorum server: one launcher of the run keeps it alive; another one takes over when that one is lost."""

import contextlib
import json
import os
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ft.job.agent import control_plane
from ft.job.agent.console import last_lines
from ft.job.control.timeouts import Timeouts
from ft.net.backoff import Backoff
from ft.platform import election, processes
from ft.platform.election import SUCCEEDED, LeaseKeeper, LeaseRecord
from ft.platform.supervisor import Supervisor

FOLDER = election.LAUNCHERS

_FRUITLESS_S, _FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 0.2, 5.0
"""A server that dies within ``_FRUITLESS_S`` seconds counts as a failed start; the pauses are those before the next."""
_POLL_S = 0.5
"""Pause in seconds after this launcher's server has found that it was replaced."""
_FIRST, _LEFT = "n0", "left-"


class QuorumHost:
    """Leader election among the launchers: the launcher that holds the lease runs the quorum server, the others watch
    the lease.

    A server that dies is restarted at once: it keeps no state, and its clients find the new server.

    Args:
        turn: number of launchers that take over before this one.
        say: called with messages for the console.
        timeouts: timeouts of the run, for the lease.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        run_dir: Path,
        name: str,
        turn: int,
        options: Mapping[str, Any],
        say: Callable[[str], None],
        timeouts: Timeouts,
    ):
        self._supervisor = supervisor
        self._run_dir, self._folder = run_dir, run_dir / FOLDER
        self._name, self._turn, self._options, self._say = name, turn, options, say
        self._timeouts = timeouts
        self._process: subprocess.Popen[bytes] | None = None
        self._since = self._due = 0.0
        self._backoff = Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        self._lease = LeaseKeeper(self._folder, self._timeouts.lease_beat_s)

    def begin(self) -> None:
        """Start the server if this launcher is the first of the run; from now on, renew or watch the lease.

        Raises:
            OSError: the folder cannot be written.
        """
        if not self._turn and election.newest(self._folder) < 0:
            self._claim()
        self._lease.start()

    def look(self, now: float) -> None:
        """Start a server, take over the lease or give it up, if that is due at time ``now`` (monotonic, in seconds)."""
        if self._lease.lost:
            self._give_up()
        elif self._lease.holds:
            if self._process is None and now >= self._due:
                self._start(takes_over=True)
        elif (age := self._lease.age(now)) is not None:
            what, why = control_plane.decide(control_plane.ControlPlaneView(age, age, None, self._turn), self._timeouts)
            if what == control_plane.CLAIM and self._claim():
                self._say(f"{why.replace('the control plane', 'its launcher')}: the quorum server is started here")

    def _ended(self, code: int) -> None:
        self._process = None
        now = time.monotonic()
        is_fruitless, pause_s = now - self._since < _FRUITLESS_S, 0.0
        if is_fruitless:
            pause_s = self._backoff.failed()
        else:
            self._backoff.reset()
        if code == SUCCEEDED:  # another launcher's server runs; the lease will show whose
            pause_s = max(pause_s, _POLL_S)
        elif self._lease.holds:
            lines = [f"    {line}" for line in last_lines(self._log, 5)] if is_fruitless else []
            how = f"the quorum server {processes.how_it_ended(code)}; another one is started, training goes on"
            self._say("\n".join([how, *lines]))
        self._due = now + pause_s
        self.look(now)

    def server(self) -> tuple[str, int] | None:
        """Return (name of this launcher, pid of the server, 0 if it has ended); None if another launcher runs it."""
        process = self._process
        if process is None and not self._lease.holds:
            return None
        return self._name, 0 if process is None else process.pid

    def first_is_lost(self) -> bool:
        """Return whether the launcher of node 0 was replaced by another one without having announced that it leaves."""
        standing = election.read(self._folder)
        is_succeeded = standing is not None and standing.term > 0 and standing.node != _FIRST
        return is_succeeded and not (self._folder / f"{_LEFT}{_FIRST}").exists()

    def close(self) -> None:
        """End the server if it runs here."""
        self._lease.close()
        with contextlib.suppress(OSError):
            (self._folder / f"{_LEFT}{self._name}").touch()
        self._end()

    def _claim(self) -> bool:
        """Take the lease and start the server; return False if another launcher was faster or the folder cannot be
        written.
        """
        term = election.newest(self._folder) + 1
        try:
            is_mine = election.claim(self._folder, term, self._name)
            if is_mine:
                self._lease.hold(
                    LeaseRecord(term, 0, "", self._name, os.getpid(), launcher=processes.identity(os.getpid()))
                )
        except OSError as error:
            self._say(f"the quorum server's lease cannot be taken: {error}")
            is_mine = False
        if not is_mine:
            self._lease.drop()
            return False
        self._start(takes_over=term > 0)
        return True

    def _give_up(self) -> None:
        self._say("another launcher has taken the quorum server over")
        self._lease.drop()
        self._end()

    @property
    def _log(self) -> Path:
        return self._run_dir / "logs" / "quorum.log"

    def _start(self, takes_over: bool) -> None:
        """Start the server. ``takes_over``: whether the run had another server before."""
        options = json.dumps({**self._options, "takes_over": takes_over})
        arguments = ["--run-dir", str(self._run_dir), "--options", options]
        self._since = time.monotonic()
        try:
            self._process = self._supervisor.start(
                "ft.job.quorum.server",
                arguments,
                self._log,
                self._ended,
                environment={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        except OSError as error:
            self._due = self._since + _LONGEST_PAUSE_S
            self._say(f"the quorum server cannot be started now: {error}")

    def _end(self) -> None:
        if self._process is not None:
            self._supervisor.end(self._process)
            self._process = None
