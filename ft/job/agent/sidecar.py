"""The control plane's process, beside an agent."""

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
    """Starts the control plane's process and remembers its pid.

    Args:
        run_dir: where it writes. where: the board it hosts. options: for ``--options``.

    Attributes:
        pid: of the process, -1 if there is none. spare_pid: of one that has imported everything and waits, or -1.
    """

    def __init__(self, run_dir: Path, where: str, options: dict[str, Any]):
        self._where = ["--run-dir", str(run_dir), "--where", where]
        self._options = options
        self.log = run_dir / "logs" / "control.log"
        self.pid = self.spare_pid = -1
        self._process: subprocess.Popen | None = None
        self._spare: subprocess.Popen | None = None

    def prepare(self) -> None:
        """Has a process ready: imports take seconds, in which nobody would decide."""
        if self._spare is None:
            self._spare = self._launch()
            self.spare_pid = self._spare.pid

    def start(self, term: int, node: str, restarts: int) -> None:
        """Starts the process for ``term``, beside the agent of ``node``, after that many ``restarts`` of the run."""
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
        """The spare process has ended and its status was taken."""
        self._spare.returncode = code
        self._spare, self.spare_pid = None, -1

    def end(self) -> None:
        """Waits for the end of the process, which leaves by itself once all agents have said that they leave: those of
        other nodes still read from it until then. One that does not is told, and then killed."""
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
        """Waits for the process to end, which leaves it to be reaped."""
        deadline = time.monotonic() + patience_s
        while self.pid >= 0 and processes.state(self.pid) not in "ZX":
            if time.monotonic() > deadline:
                return False
            time.sleep(0.005)
        return True

    def kill(self) -> None:
        """Kills and reaps the process, if there is one: a second one must find its place empty."""
        if self.pid >= 0:
            processes.send(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            self.reaped(-signal.SIGKILL)

    def reaped(self, code: int) -> None:
        """The process has ended and its status was taken."""
        self.pid = -1
        self._process.returncode = code


def _tell(process: subprocess.Popen, text: str) -> None:
    """Runs in a thread: the text may exceed a pipe's buffer, and the process reads it only after its imports."""
    with contextlib.suppress(OSError), process.stdin as line:  # it has died: its exit will tell
        line.write(text.encode())


def main() -> None:
    """Entry of the process: binds it to the agent, whose pid is ``sys.argv[1]``, and becomes ft.job.control once it is
    told with what arguments, by a line of JSON.

    Signals that end a run are for the agent: Slurm may send them to all processes of a step, and this one is needed
    until the workers have saved.
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
    ending.leave(status)  # threads of the store may live on
