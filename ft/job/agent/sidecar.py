"""The control plane's process, which runs beside one of the agents."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

from ft.base.checkout import CHECKOUT
from ft.job.agent import ending
from ft.platform import processes

_LEAVE_S, _TERM_S = 10.0, 2.0
_BOOT = "import sys; sys.path[0] = sys.argv.pop(1); from ft.job.agent.sidecar import main; main()"


class Sidecar:
    """Starts and ends the control plane's process.

    Args:
        run_dir: the run's directory.
        where: address of the message board that the control plane hosts.
        options: settings for its ``--options``.

    Attributes:
        pid: pid of the process, -1 if there is none.
        spare_pid: pid of a standby process that has imported everything and waits, or -1.
    """

    def __init__(self, run_dir: Path, where: str, options: dict[str, Any]):
        self._where = ["--run-dir", str(run_dir), "--where", where]
        self._options = options
        self.log = run_dir / "logs" / "control.log"
        self.pid = self.spare_pid = -1
        self._process: subprocess.Popen | None = None
        self._spare: subprocess.Popen | None = None

    def prepare(self) -> None:
        """Start a standby process, if there is none: imports take seconds, during which nobody would take decisions."""
        if self._spare is None:
            self._spare = self._launch()
            self.spare_pid = self._spare.pid

    def start(self, term: int, node: str, restarts: int) -> None:
        """Start the control plane for ``term`` beside the agent of ``node``, after ``restarts`` restarts of the run."""
        options = json.dumps({**self._options, "restarts": restarts})
        arguments = [*self._where, "--node", node, "--term", str(term), "--options", options]
        self._process = self._spare or self._launch()
        self._spare, self.spare_pid = None, -1
        self.pid = self._process.pid
        threading.Thread(target=_tell, args=(self._process, json.dumps(arguments)), daemon=True).start()

    def _launch(self) -> subprocess.Popen:
        with open(self.log, "ab") as log:
            return subprocess.Popen(
                [sys.executable, "-c", _BOOT, str(CHECKOUT), str(os.getpid())],
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                start_new_session=True,  # Ctrl-C is for the agent
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
            )

    def spare_reaped(self, code: int) -> None:
        """Record that the standby process has ended and was reaped."""
        self._spare.returncode = code
        self._spare, self.spare_pid = None, -1

    def end(self) -> None:
        """Wait for the process to end, and terminate it if it does not.

        It exits by itself once all agents have announced that they leave; until then agents of other nodes still read
        from it. After ``_LEAVE_S`` seconds it gets SIGTERM, and ``_TERM_S`` seconds later SIGKILL.
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
        """Kill and reap the process, if there is one, so that the next one finds its address free."""
        if self.pid >= 0:
            processes.send(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            self.reaped(-signal.SIGKILL)

    def reaped(self, code: int) -> None:
        """Record that the process has ended and was reaped."""
        self.pid = -1
        self._process.returncode = code


def _tell(process: subprocess.Popen, text: str) -> None:
    """Write the arguments to the process.

    Runs in a thread, because the text may exceed the pipe's buffer and the process reads it only after its imports.
    """
    # if the process has died, its exit code is handled elsewhere
    with contextlib.suppress(OSError), process.stdin as line:
        line.write(text.encode())


def main() -> None:
    """Run the process: bind it to the agent with pid ``sys.argv[1]``, import, and wait for its arguments (JSON).

    With the arguments it becomes ft.job.control. It ignores SIGINT and SIGTERM: Slurm may send them to all processes of
    a step, and the control plane is needed until the workers have saved.
    """
    agent = int(sys.argv.pop(1))
    processes.die_with_parent(signal.SIGKILL)
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)
    processes.set_name("ft-ctl-spare")
    if os.getppid() != agent:
        return
    from ft.job.control import sidecar
    from ft.net import store

    store.warm_up()
    line = sys.stdin.read()
    status = 0
    if line:
        processes.set_name("ft-control")
        try:
            sidecar.main(json.loads(line))
        except SystemExit as end:
            status = ending.status_of(end)
        except Exception:
            traceback.print_exc()
            status = 1
    ending.leave(status)  # threads of the store may still run
