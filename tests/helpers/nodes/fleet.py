"""One `ft run` on every host of a lab."""

import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from ft_runs import LIMIT_S, Finished, Running, leftovers

from nodes.lab import Host, Lab

_PORT = 29400


class Node(Running):
    """The agent of one host; after the host comes back, a new agent."""

    def __init__(self, host: Host, folder: Path, words: list):
        self.host, self.folder = host, folder
        self._log = folder.with_name(f"{folder.name}.{host.name}.out")
        self._begin(words, host)


class Fleet:
    """A run with its control plane on host 0; the last ``standby_nodes`` hosts start without logical ranks.

    Args:
        lab: the hosts.
        folder: directory of the run.
        script_flags: flags of the training script.
        standby_nodes: number of hosts that start without logical ranks.
        nproc: workers on each host.
        options: further options of ``ft run``.
    """

    def __init__(
        self, lab: Lab, folder: Path, script_flags: str, *, standby_nodes: int = 1, nproc: int = 2, options: str = ""
    ):
        self.lab, self.folder = lab, folder
        shared = ["--nnodes", len(lab.hosts), "--standby-nodes", standby_nodes, "--run-dir", folder]
        shared += ["--nproc-per-node", nproc, "--rdzv-endpoint", f"{lab.hosts[0].address}:{_PORT}"]
        self._shared = [*shared, *options.split()]
        self._script = ["pretrain_gpt.py", *script_flags.split()]
        self.nodes = [self._start(host) for host in lab.hosts]

    def _start(self, host: Host) -> Node:
        return Node(host, self.folder, ["--node-rank", host.index, *self._shared, *self._script])

    def come_back(self, host: Host) -> None:
        """Start the agent of this host again with the same flags, as an operator would."""
        self.nodes[host.index] = self._start(host)

    def wait_for(self, true: Callable[[], bool], limit_s: float = LIMIT_S, what: str = "it") -> float:
        """Return the seconds until `true()`; fail with all logs if all agents have ended or the time is up before."""
        began = time.monotonic()
        while not true():
            over = all(node.process.poll() is not None for node in self.nodes)
            if over or time.monotonic() > began + limit_s:
                raise AssertionError(f"{what} did not come about in {limit_s} s: {self.explain()}")
            time.sleep(0.02)
        return time.monotonic() - began

    def wait_steps(self, count: int, limit_s: float = LIMIT_S) -> None:
        """Wait for `count` more steps."""
        aim = self.step() + count
        self.wait_for(lambda: self.step() >= aim, limit_s, f"step {aim}")

    def step(self) -> int:
        return self.nodes[0].step()

    def so_far(self) -> Finished:
        return Finished(-1, "", self.folder)

    def wait(self, limit_s: float = LIMIT_S, lost: tuple[int, ...] = ()) -> Finished:
        """Wait for the end of every agent whose host is not `lost`, and check that none of their processes is left.

        Returns:
            the worst exit code, and what the run has written.
        """
        deadline = time.monotonic() + limit_s
        codes = []
        for node in self.nodes:
            if node.host.index in lost:
                continue
            try:
                codes.append(node.process.wait(max(0.1, deadline - time.monotonic())))
            except subprocess.TimeoutExpired:
                raise AssertionError(f"{node.host.name} hangs after {limit_s} s: {self.explain()}") from None
        done = Finished(max(codes), self.output(), self.folder)
        left = leftovers(self.folder)
        assert not left, f"left behind: {left}\n{self.explain()}"
        return done

    def output(self) -> str:
        return "".join(f"\n=== {node.host.name}\n{node.output()[-4000:]}" for node in self.nodes)

    def explain(self) -> str:
        codes = {node.host.name: node.process.poll() for node in self.nodes}
        return f"exit codes {codes}\n{Finished(-1, self.output(), self.folder).explain()}"

    def stop(self) -> None:
        """Kill everything that still runs."""
        for node in self.nodes:
            if node.process.poll() is None:
                node.process.send_signal(signal.SIGKILL)
        for host in self.lab.hosts:
            host.kill_all()
        for node in self.nodes:
            node.process.wait()

    def __enter__(self) -> "Fleet":
        return self

    def __exit__(self, *exception) -> None:
        self.stop()
