"""Replicas on several nodes with standby nodes: the loss of a whole node costs its replica no restart."""

import os
import socket
import sys

import psutil
import replica_runs
from ft_runs import ROOT, leftovers
from harness import started
from replica_runs import Done, Replicas

from ft.base import events

STEPS = 150
EVERY = "--use-distributed-optimizer --ft-hot-swap"


class Node(Replicas):
    """One of the nodes of a run with two replicas of two nodes each, and one standby node, which is of replica 0."""

    def __init__(self, folder, rank: int, port: int, script_flags: str):
        self.folder = folder / "run"
        self._log = folder / f"node{rank}.out"
        command = [sys.executable, "-m", "ft", "run", "--nnodes", "5", "--standby-nodes", "1", "--node-rank", str(rank)]
        command += ["--nproc-per-node", "1", "--ft-hsdp-replicas", "2", "--rdzv-endpoint", f"127.0.0.1:{port}"]
        command += ["--run-dir", str(self.folder), "pretrain_gpt.py", *script_flags.split()]
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "FT_HSDP_DIGESTS": "1"}
        self.process = started.start(command, ROOT, environ, self._log)

    def kill_all(self) -> None:
        """Kill every process of the node, the launcher first."""
        family = [psutil.Process(self.process.pid)]
        family += family[0].children(recursive=True)
        for process in family:
            process.kill()


def test_a_standby_node_takes_a_lost_nodes_place_in_its_replica(corpus, tmp_path):
    flags = replica_runs.flags(corpus, EVERY, STEPS, batch=8)
    port = free_port()
    nodes = [Node(tmp_path, rank, port, flags) for rank in range(5)]
    first = nodes[0]
    try:
        first.wait_for(lambda: first.step() >= 10)
        nodes[1].kill_all()
        code = first.process.wait(120)
        done = Done(code, first.output(), first.folder)
        assert code == 0 and [nodes[rank].process.wait(30) for rank in (2, 3, 4)] == [0, 0, 0], done.explain()
    finally:
        for node in nodes:
            node.stop()
    assert not leftovers(first.folder)
    problems = done.proof.problems(STEPS, 1)
    assert not problems, f"{problems}\n{done.explain()}"
    assert not done.of(0, events.RESTARTED) and not done.of(1, events.RESTARTED), done.explain()
    assert "standbys of 0" in nodes[4].output()
    seats = done.of(0, events.EPOCH_OPENED)[-1].detail["seats"]
    assert {seat.split(".")[0] for seat in seats.values()} == {"n0", "n2"}, "the replica's own third node"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
