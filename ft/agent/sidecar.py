"""The control plane's process, beside an agent."""

import json
import os
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from ft.agent import processes

_LEAVE_S, _TERM_S = 10.0, 2.0
_BOOT = "import sys; sys.path[0] = sys.argv.pop(1); from ft.agent.sidecar import main; main()"


class Sidecar:
    """Starts ``python -m ft.control`` and remembers its pid.

    Args:
        run_dir: where it writes. where: the board it hosts. options: for ``--options``.
    """

    def __init__(self, run_dir: Path, where: str, options: dict[str, Any]):
        self._where = ["--run-dir", str(run_dir), "--where", where]
        self._options = options
        self.log = run_dir / "logs" / "control.log"
        self.pid = -1
        self._process: subprocess.Popen | None = None

    def start(self, term: int, node: str, restarts: int) -> None:
        """Starts the process for ``term``, beside the agent of ``node``, after that many ``restarts`` of the run."""
        root = str(Path(__file__).parent.parent.parent)
        options = json.dumps({**self._options, "restarts": restarts})
        tenure = ["--node", node, "--term", str(term)]
        with open(self.log, "ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _BOOT, root, str(os.getpid()), *self._where, *tenure, "--options", options],
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                start_new_session=True,  # Ctrl-C is for the agent
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self.pid = self._process.pid

    def end(self) -> None:
        """Waits for the end of the process, which leaves by itself once all agents have said that they leave: those of
        other nodes still read from it until then. One that does not is told, and then killed."""
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


def main() -> None:
    """Entry of the process: binds it to the agent, whose pid is ``sys.argv[1]``, and becomes ft.control."""
    agent = int(sys.argv.pop(1))
    processes.die_with_parent(signal.SIGKILL)
    processes.set_name("ft-control")
    if os.getppid() == agent:
        runpy.run_module("ft.control", run_name="__main__", alter_sys=True)
