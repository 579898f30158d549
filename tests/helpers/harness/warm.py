"""The test's side of the warm server: it starts the server, restarts a killed one, and receives the ends of ranks."""

import atexit
import functools
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from harness import processes, wire

START_LIMIT_S = 180.0


class Server:
    """The warm process. It is started at the first call, and again after it was killed.

    Args:
        folder: folder for its log.
        environment: environment variables to set in it.
    """

    def __init__(self, folder: Path, **environment: str):
        self._folder, self._environment = folder, environment
        self._process: subprocess.Popen | None = None
        self._socket: socket.socket | None = None
        self.exitcodes: dict[int, int] = {}

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def start_ranks(self, request: dict) -> list[int]:
        """Fork the ranks of `request`; return their pids in rank order."""
        self._ensure()
        wire.send(self._socket, request)
        while (message := wire.receive(self._socket))[0] != "started":
            self._note(message)
        for pid in message[1]:
            self.exitcodes.pop(pid, None)
        return message[1]

    def start_command(self, request: dict, descriptors: list[int]) -> None:
        """Fork a command of ``ft``; the arguments are those of :func:`harness.commands.keep`."""
        self._ensure()
        wire.send(self._socket, request)
        socket.send_fds(self._socket, [b"f"], descriptors)

    def listen(self, patience: float) -> None:
        """Process the messages that have arrived; wait up to `patience` seconds for the first. Raise RuntimeError if
        the server is gone."""
        self._socket.settimeout(max(patience, 0.001))
        try:
            while True:
                self._note(wire.receive(self._socket))
                self._socket.settimeout(0.001)
        except TimeoutError:
            pass
        except (EOFError, ConnectionError) as gone:
            raise RuntimeError(f"the warm server died: {self._log()}") from gone
        finally:
            self._socket.settimeout(None)

    def close(self) -> None:
        """End the server and all its descendants."""
        if self._process is None:
            return
        self._socket.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            processes.end(processes.members((), {self._process.pid}))
            self._process.kill()
            self._process.wait()
        self._process = None

    def _ensure(self) -> None:
        if self._process is None or self._process.poll() is not None:
            self._start()

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        here = Path(__file__).parent.parent
        path = os.pathsep.join([str(here), *filter(None, sys.path)])
        with open(self._folder / "server.log", "wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "harness.server", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env={
                    **os.environ,
                    "PYTHONPATH": path,
                    "OMP_NUM_THREADS": "1",
                    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
                    **self._environment,
                },
                start_new_session=True,  # Ctrl-C is for the test run, which then ends the server
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        theirs.close()
        self._socket = ours
        ours.settimeout(START_LIMIT_S)
        try:
            state, detail = wire.receive(ours)
        except (EOFError, TimeoutError) as gone:
            raise RuntimeError(f"the warm server did not start: {self._log()}") from gone
        finally:
            ours.settimeout(None)
        if state != "ready":
            raise RuntimeError(f"the warm server cannot import what it serves:\n{detail}")

    def _note(self, message: tuple) -> None:
        _, pid, exitcode = message
        self.exitcodes[pid] = exitcode

    def _log(self) -> str:
        return (self._folder / "server.log").read_text(errors="replace")[-4000:]


@functools.cache
def shared() -> Server:
    """Return the server that forks the commands of all tests of this process; it ends with this process."""
    folder = Path(tempfile.mkdtemp(prefix="warm-server-"))
    server = Server(folder, TORCH_CPP_LOG_LEVEL="ERROR")  # as ft run sets it before it imports torch
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    atexit.register(server.close)
    return server
