"""The node agent's handle on the warm pool: starts its process, restarts it when it dies, and requests workers."""

import json
import os
import socket
import subprocess
from collections import deque
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ft.base import bounded_json
from ft.base.errors import FtError
from ft.job.agent import environment
from ft.job.agent.console import Console
from ft.job.agent.options import Script
from ft.job.control.timeouts import Timeouts
from ft.net.channel import Channel
from ft.platform import processes
from ft.platform.processes import MOST_IN_A_ROW, Standstill
from ft.platform.supervisor import Supervisor

if TYPE_CHECKING:
    from ft.job.agent.workforce import Workforce


class PoolBroken(FtError):
    """Several warm pools in a row have died, or stopped making progress, before they forked a worker."""


class WarmPool:
    """Requests workers from the warm pool asynchronously: ``fork`` sends a request, ``take`` returns started workers.

    Args:
        stuck_s: seconds without progress, while requests are open, after which the pool counts as stuck.

    Attributes:
        process: the pool's process, None before the first start.
        channel: connection to that process; call ``take`` when the channel is readable.
    """

    def __init__(self, supervisor: Supervisor, script: Script, log: Path, stuck_s: float = Timeouts().stuck_s):
        self._supervisor = supervisor
        self._config = asdict(script)
        self._environment = {**os.environ, **environment.defaults(os.environ, script.args)}
        self._log, self._stuck_s = log, stuck_s
        self._asked: deque[dict[str, Any]] = deque()
        self._alive: set[int] = set()
        self._fruitless = self._heard = 0
        self._standstill, self._stuck = Standstill(), ""
        self.channel: Channel | None = None
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, on_exit: Callable[[int], None]) -> None:
        """Start the process. Requests made before it is ready wait in its socket.

        Args:
            on_exit: called with the exit code when the process has ended.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            self.process = self._supervisor.start(
                "ft.job.agent.warm",
                [str(theirs.fileno()), json.dumps(self._config)],
                self._log,
                on_exit,
                environment=self._environment,
                pass_fds=[theirs.fileno()],
            )
        self._standstill, self._stuck = Standstill(), ""
        self.channel = Channel(ours)
        if self._alive:
            self.channel.send(json.dumps({"guard": sorted(self._alive)}))
        for request in self._asked:
            self.channel.send(json.dumps({"fork": request}))

    def fork(self, worker: str, log: str, env: dict[str, str]) -> None:
        """Request a worker."""
        request = {"worker": worker, "log": log, "env": env}
        self._asked.append(request)
        if self.channel is not None:
            self.channel.send(json.dumps({"fork": request}))

    def take(self) -> tuple[list[tuple[str, int]], list[str]]:
        """Return the pool's reports since the last call: ((name, pid) of each started worker, notes for the user)."""
        born, notes = [], []
        for line in (self.channel and self.channel.receive()) or []:
            message = bounded_json.loads(line, non_finite=True)
            self._heard += 1
            if "pid" in message:
                self._asked.popleft()
                self._alive.add(message["pid"])
                self._fruitless = 0
                born.append((message["worker"], message["pid"]))
            elif "note" in message:
                notes.append(message["note"])
        return born, notes

    def flush(self) -> None:
        """Send the data that the socket did not accept at once. Call it repeatedly."""
        if self.channel is not None and self.channel.wants_write:
            self.channel.flush()

    def kill_if_stuck(self, now: float) -> str:
        """Kill the process if requests are open and it makes no progress.

        Return the reason, or "" if it was not killed.

        ``restart`` has to follow the exit of the process.
        """
        if not self._asked or self.channel is None or self.process is None:
            self._standstill = Standstill()
        elif not self._stuck and (seconds := self._standstill.look(now, self.process.pid, self._heard)) > self._stuck_s:
            how = processes.describe(self.process.pid)
            owes = f"the warm pool owes {len(self._asked)} worker(s)"
            self._stuck = f"{owes} and has done nothing for {seconds:.0f} s ({how})"
            processes.kill_whole([self.process.pid])
            return self._stuck
        return ""

    def forget(self, pid: int) -> None:
        """Notify the pool that a worker has ended: the kernel may give its pid to an unrelated process."""
        self._alive.discard(pid)
        if self.channel is not None:
            self.channel.send(json.dumps({"forget": pid}))

    def restart(self, code: int, on_exit: Callable[[int], None]) -> None:
        """Start a new process, which gets the open requests, after the old one has ended.

        Args:
            on_exit: called with the exit code when the new process has ended.

        Raises:
            PoolBroken: several processes in a row ended before they forked a worker.
        """
        self._fruitless += 1
        if self.channel is not None:
            self.channel.close()
        if self._fruitless >= MOST_IN_A_ROW:
            last = self._log.read_text(errors="replace").splitlines()[-15:]
            how = self._stuck or f"the warm pool {processes.how_it_ended(code)}"
            times = f"the run ends: {self._fruitless} warm pools in a row have forked no worker"
            raise PoolBroken("\n".join([times, f"{how}; its last lines:", *last]))
        self.start(on_exit)

    def close(self) -> None:
        """Close the socket, which ends the process."""
        if self.channel is not None:
            self.channel.close()
            self.channel = None


class PoolUpkeep:
    """Starts the warm pool, restarts it when it dies, kills it when it is stuck, and processes its messages.

    Args:
        pool: the warm pool, not started yet.
        on_exit: called with (pid, exit code) of each worker that had ended before the pool reported its start.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        pool: WarmPool,
        workforce: "Workforce",
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
        if self._pool.channel is not None and self._pool.channel.gone:
            # the pool's process has closed its socket, and its exit follows
            self._supervisor.unwatch(self._pool.channel)
        for note in notes:
            self._console.complain(note)
        for pid, code in self._workforce.take_early():
            self._on_exit(pid, code)
