"""Runs of `ft run` in separate processes, for end-to-end tests of recovery from faults."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import small_runs as runs
from harness import started
from nodes import Host

from ft.base import events
from ft.platform.network import free_port

ROOT = Path(__file__).parent.parent.parent
LIMIT_S = 400.0
LONGER = "slow@step=2:rank=0:factor=4:for=300s"
"""Steps long enough, by sleeping, that a standby starts within a run of some dozens."""


@dataclass
class Finished:
    """A run that has ended."""

    code: int
    output: str
    folder: Path

    @property
    def events(self) -> list:
        return events.read(self.folder / "events.jsonl")

    def named(self, name: str) -> list:
        assert name in events.SCHEMA, f"{name} is not the name of an event"
        return [event for event in self.events if event.name == name]

    @property
    def metrics(self) -> list[dict]:
        return runs.metrics(self.folder / "metrics.jsonl")

    @property
    def losses(self) -> list[float]:
        steps = self.metrics
        assert [m["step"] for m in steps] == list(range(1, len(steps) + 1)), "a step is missing or there twice"
        return [m["loss"] for m in steps]

    def explain(self) -> str:
        logs = sorted((self.folder / "logs").glob("*.log"))
        tails = "".join(f"\n--- {log.name}\n{log.read_text()[-1500:]}" for log in logs)
        journal = self.folder / "journal.jsonl"
        decisions = journal.read_text()[-3000:] if journal.exists() else ""
        return f"exit code {self.code}\n{self.output[-4000:]}\n--- journal\n{decisions}{tails}"


class Running:
    """An `ft run` in progress. `wait` ends it in any case, and checks that none of its processes is left."""

    def __init__(self, folder: Path, script: str, flags: str, *, nproc: int = 4, standby: int = 1, options: str = ""):
        self.folder = folder
        self._log = folder.with_name(folder.name + ".out")
        words = ["--nproc-per-node", nproc, "--standby", standby, "--run-dir", folder, *options.split()]
        self._begin([*words, script, *flags.split()])

    def _begin(self, words: list, host: Host | None = None, **environ: str) -> None:
        """Start ``ft run`` with these words and environment variables; its output goes to ``self._log``."""
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **environ}
        self.process = started.start([sys.executable, "-m", "ft", "run", *words], ROOT, environ, self._log, host)

    def lose_power(self) -> None:
        """Kill all processes of the node at once: none of them sees another one end before."""
        root = psutil.Process(self.process.pid)
        family = [root, *root.children(recursive=True)]
        for signum in (signal.SIGSTOP, signal.SIGKILL):
            for process in family:
                with contextlib.suppress(psutil.NoSuchProcess):  # one that only starts others may have ended
                    process.send_signal(signum)

    def output(self) -> str:
        return self._log.read_text(errors="replace")

    def wait_for(self, true, limit_s: float = LIMIT_S) -> None:
        """Wait until `true()`; fail with all logs if the run ends or the time is up before."""
        deadline = time.monotonic() + limit_s
        while not true():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"did not come about: {self.stop().explain()}")
            time.sleep(0.02)

    def step(self) -> int:
        """Return the newest step in the metrics file, 0 before there is one."""
        try:
            return json.loads((self.folder / "metrics.jsonl").read_text().splitlines()[-1])["step"]
        except (OSError, ValueError, IndexError, KeyError):
            return 0

    def wait(self, limit_s: float = LIMIT_S) -> Finished:
        try:
            code = self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"hangs after {limit_s} s: {self.stop().explain()}") from None
        done = Finished(code, self.output(), self.folder)
        left = leftovers(self.folder)
        for process in left:
            process.kill()
        assert not left, f"left behind: {left}\n{done.explain()}"
        return done

    def stop(self) -> Finished:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
        for process in leftovers(self.folder):
            process.kill()
        return Finished(self.process.returncode, self.output(), self.folder)


class Node(Running):
    """One node of a run of several, all on this machine."""

    def __init__(self, folder: Path, words: list):
        self.folder = folder
        self._log = folder.with_name(f"node.{time.monotonic()}.out")
        self._begin(words)


class Nodes(list[Node]):
    """The nodes of a run with two workers each, of which the last ``standby_nodes`` carry standbys; stopped at the end.

    Args:
        tmp_path: has the folder ``run`` of the run.
        script_flags: those of the script.
        number: of nodes that are started at once.
        options: those of ``ft run``.
        nnodes: number of nodes of the run.
    """

    def __init__(
        self,
        tmp_path: Path,
        script_flags: str,
        number: int = 0,
        options: str = "",
        *,
        nnodes: int = 3,
        standby_nodes: int = 1,
        script: str = "pretrain_gpt.py",
    ):
        super().__init__()
        self._folder, self._options, self._script = tmp_path / "run", options, [script, *script_flags.split()]
        self._words = ["--nnodes", nnodes, "--standby-nodes", standby_nodes, "--nproc-per-node", 2]
        self._words += ["--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--run-dir", self._folder]
        for rank in range(number):
            self.add(rank)

    def add(self, rank: int, options: str = "", script_flags: str = "") -> None:
        """Start a node, with further options and flags."""
        words = [*self._words, "--node-rank", rank, *self._options.split(), *options.split()]
        self.append(Node(self._folder, [*words, *self._script, *script_flags.split()]))

    def __enter__(self) -> "Nodes":
        return self

    def __exit__(self, *error) -> None:
        for node in self:
            node.stop()
        assert error[0] is not None or not leftovers(self._folder)


def ft_run(folder: Path, flags: str, *, script: str = "pretrain_gpt.py", limit_s: float = LIMIT_S, **how) -> Finished:
    """Run `ft run` from start to end."""
    return Running(folder, script, flags, **how).wait(limit_s)


def flags(corpus: str, extra: str = "", steps: int = 12) -> str:
    """Return the flags of a tiny run with hot-swap."""
    return f"{runs.BASE} --train-iters {steps} --data-path {corpus} --ft-hot-swap {extra}"


def leftovers(folder: Path, patience_s: float = 30.0) -> list[psutil.Process]:
    """Return the processes that still belong to the run after `patience_s` seconds."""
    deadline = time.monotonic() + patience_s
    while (found := _of_run(folder)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


def _of_run(folder: Path) -> list[psutil.Process]:
    """Return the run's processes, found by the log that they write or by their command line."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid == os.getpid() or process.status() == psutil.STATUS_ZOMBIE:
                continue
            output = os.readlink(f"/proc/{process.pid}/fd/1")
            if output.startswith((f"{folder}/", f"{folder}.out")) or str(folder) in process.cmdline():
                found.append(process)
        except (psutil.Error, OSError):
            continue
    return found
