"""Starts and ends the control plane's process on a node of ``ft run``.

The control plane is one process for the whole run; it decides about recoveries and sends orders to the node agents. It
runs on the node of one agent, as the agent's child. Leadership is divided into numbered terms; each term has one
control plane. A standby process, which has imported everything, can be prepared so that a later start is fast.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ft.base import bounded_json
from ft.job.agent import ending
from ft.platform import processes
from ft.platform.supervisor import Supervisor

_LEAVE_S, _TERM_S = 10.0, 2.0


class Sidecar:
    """Starts and ends the control plane's process.

    Args:
        supervisor: supervisor of the agent's child processes.
        run_dir: the run's directory.
        where: address on which the control plane accepts the agents' messages.
        options: settings of the control plane, passed to it as ``--options``.

    Attributes:
        log: file for the output of the process.
        on_exit: called with the exit code when the control plane's process has ended by itself.
    """

    def __init__(self, supervisor: Supervisor, run_dir: Path, where: str, options: dict[str, Any]):
        self._supervisor = supervisor
        self._where = ["--run-dir", str(run_dir), "--where", where]
        self._options = options
        self.log = run_dir / "logs" / "control.log"
        self.on_exit: Callable[[int], None] = lambda code: None
        self._process: subprocess.Popen | None = None
        self._spare: subprocess.Popen | None = None

    @property
    def pid(self) -> int:
        """Return the pid of the process, -1 if there is none."""
        return self._process.pid if self._process is not None else -1

    def prepare(self) -> None:
        """Start a standby process, if there is none: a takeover must not wait for imports, which take seconds."""
        if self._spare is None:
            self._spare = self._launch()

    def start(self, term: int, node: str, restarts: int) -> None:
        """Start the control plane.

        Args:
            term: number of the term.
            node: name of the agent of this node.
            restarts: number of restarts of the run so far.
        """
        options = json.dumps({**self._options, "restarts": restarts})
        arguments = [*self._where, "--node", node, "--term", str(term), "--options", options]
        self._process = self._spare or self._launch()
        self._spare = None
        threading.Thread(target=_tell, args=(self._process, json.dumps(arguments)), daemon=True).start()

    def _launch(self) -> subprocess.Popen:
        child = self._supervisor.start(
            __name__,
            [],
            self.log,
            lambda code: self._ended(child, code),
            environment={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
        )
        return child

    def _ended(self, child: subprocess.Popen, code: int) -> None:
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
        if self._spare is not None:
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


def _tell(process: subprocess.Popen, text: str) -> None:
    """Write the command-line arguments, ``text``, to the standard input of the process.

    Runs in a thread, because the text may exceed the pipe's buffer and the process reads it only after its imports.
    """
    # if the process has died, its exit code is handled elsewhere
    with contextlib.suppress(OSError), process.stdin as line:
        line.write(text.encode())


def main() -> None:
    """Run the process of the control plane, or of its standby.

    The process does its imports and then waits for its arguments, a JSON list on standard input. With the arguments it
    runs the control plane (``ft.job.control.sidecar``); if standard input is closed without any, it exits. It ignores
    SIGINT and SIGTERM, because the control plane is needed until the workers have saved their checkpoints.
    """
    processes.set_name("ft-ctl-spare")
    from ft.job.control import sidecar
    from ft.net.store import lone_tcp_store

    lone_tcp_store()  # with a process's first store, torch looks up names, for 10 s if no name server answers
    line = sys.stdin.read()
    status = 0
    if line:
        processes.set_name("ft-control")
        try:
            sidecar.main(bounded_json.loads(line, non_finite=True))
        except SystemExit as end:
            status = ending.status_of(end)
        except Exception:
            traceback.print_exc()
            status = 1
    ending.leave(status)  # threads of the store may still run
