"""The networks that carry snapshots, for tests that use each: TCP, and MPI between two relays under mpirun."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from ft.net import streams
from ft.net.streams import TcpNetwork

ROOT = Path(__file__).parent.parent.parent
KINDS = ["tcp", "mpi"]
MPIRUN = shutil.which("mpirun", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")
AS_ROOT = ["--allow-run-as-root"] if os.geteuid() == 0 else []


def need_mpi() -> str:
    """Return mpirun's path; skip the test if there is no Open MPI with mpi4py."""
    if MPIRUN is None:
        pytest.skip("Open MPI is not installed: pip install .[mpi]")
    pytest.importorskip("mpi4py", reason="mpi4py is not installed: pip install .[mpi]")
    return MPIRUN


def mpirun(ranks: int) -> list[str]:
    """Return the start of a command line that runs ``ranks`` processes."""
    return [need_mpi(), *AS_ROOT, "--oversubscribe", "--with-ft", "ulfm", "-n", str(ranks)]


class Relays:
    """MPI relays of several nodes on this machine, without agents."""

    def __init__(self, ranks: int):
        self.folder = Path(tempfile.mkdtemp(prefix="ft-mpi-"))
        self.log = self.folder / "log"
        bound = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []
        command = [*bound, *mpirun(ranks), sys.executable, "-m", "ft.net.mpi_relay", str(self.folder)]
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                command,
                cwd=ROOT,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self.ranks = ranks
        deadline = time.monotonic() + 180
        while not all(streams.answers(self.folder / str(rank), 5) for rank in range(ranks)):
            assert self.process.poll() is None and time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.05)

    def network(self, node: int) -> streams.MpiNetwork:
        return streams.MpiNetwork(self.folder / str(node), node)

    def signal(self, node: int, signum: int) -> None:
        os.kill(self.pid(node), signum)

    def pid(self, node: int) -> int:
        return int((self.folder / str(node) / "pid").read_text())

    def close(self) -> None:
        for signum in (signal.SIGCONT, signal.SIGTERM):
            for node in range(self.ranks):
                with contextlib.suppress(ProcessLookupError):
                    self.signal(node, signum)
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            for node in range(self.ranks):
                with contextlib.suppress(ProcessLookupError):
                    self.signal(node, signal.SIGKILL)
        shutil.rmtree(self.folder)


class Networks:
    """Assigns workers to nodes: worker i is on node i."""

    def __init__(self, relays: Relays | None = None):
        self._relays, self._host = relays, TcpNetwork("127.0.0.1")

    def of(self, worker: int):
        return self._host if self._relays is None else self._relays.network(worker % self._relays.ranks)

    def text(self, worker: int) -> str:
        """Return a text from which another process makes the worker's network with ``from_text``."""
        return "tcp" if self._relays is None else f"{self._relays.folder}/{worker % self._relays.ranks}"


def from_text(text: str):
    return TcpNetwork("127.0.0.1") if text == "tcp" else streams.MpiNetwork(text, int(Path(text).name))
