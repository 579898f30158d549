"""Replicas on several nodes with standby nodes: the loss of a whole node costs its replica no restart; a standby node
of another replica takes the place of a node whose replica has none.
"""

import contextlib
from collections.abc import Iterator

import pytest
import replica_runs
from ft_runs import leftovers
from replica_runs import Done, Replicas

from ft.base import events
from ft.platform.network import free_port

STEPS = 150
EVERY = "--use-distributed-optimizer --ft-hot-swap"


class Node(Replicas):
    """One of the nodes of a run with two replicas and one standby node, which is a part of replica 0."""

    def __init__(self, folder, rank: int, port: int, script_flags: str, nodes: int, nproc: int, options: str):
        self.folder = folder / "run"
        self._log = folder / f"node{rank}.out"
        words = ["--nnodes", nodes, "--standby-nodes", 1, "--node-rank", rank, "--nproc-per-node", nproc]
        words += ["--ft-hsdp-replicas", 2, "--rdzv-endpoint", f"127.0.0.1:{port}", "--run-dir", self.folder]
        self._begin([*words, *options.split(), "pretrain_gpt.py", *script_flags.split()])


@contextlib.contextmanager
def cluster(folder, nodes: int, flags: str, nproc: int = 1, options: str = "") -> Iterator[list[Node]]:
    """Start a launcher for each node; afterwards, no process is left."""
    port = free_port()
    found = [Node(folder, rank, port, flags, nodes, nproc, options) for rank in range(nodes)]
    try:
        yield found
    finally:
        for node in found:
            node.stop()
    assert not leftovers(found[0].folder)


def end_of(nodes: list[Node], lost: int, limit_s: float = 180.0) -> Done:
    """Wait for the end of the run, which has lost one node."""
    done = Done(nodes[0].process.wait(limit_s), nodes[0].output(), nodes[0].folder)
    codes = [node.process.wait(180) for rank, node in enumerate(nodes) if rank not in (0, lost)]
    assert done.code == 0 and not any(codes), "\n".join([str(codes), done.explain(), *(n.output() for n in nodes)])
    return done


def test_a_standby_node_takes_a_lost_nodes_place_in_its_replica(corpus, tmp_path):
    with cluster(tmp_path, 5, replica_runs.flags(corpus, EVERY, STEPS, batch=8)) as nodes:
        nodes[0].wait_for(lambda: nodes[0].step() >= 10)
        nodes[1].lose_power()
        done = end_of(nodes, 1)
        assert "standbys of 0" in nodes[4].output()
    done.check(STEPS, 1)
    assert not done.of(0, events.RESTARTED) and not done.of(1, events.RESTARTED), done.explain()
    seats = done.of(0, events.EPOCH_OPENED)[-1].detail["seats"]
    assert {seat.split(".")[0] for seat in seats.values()} == {"n0", "n2"}, "the replica's own third node"


LONG = pytest.mark.long


@pytest.mark.parametrize(
    ("size", "lost"),
    [pytest.param(1, 1, marks=LONG), pytest.param(2, 2, marks=LONG), pytest.param(2, 3, marks=LONG)],
    ids=["its only node", "the node of its control plane", "its last node"],
)
def test_a_standby_node_takes_a_lost_nodes_place_in_another_replica(corpus, tmp_path, size, lost):
    """``size``: nodes of each replica; ``lost``: the node of replica 1 that is lost."""
    spare = 2 * size
    full = f"--devices-per-node {2 // size}"  # otherwise, the other node of the replica starts another worker
    slow = (f"slow@replica={replica}:step=8:rank=0:factor=6:for=300s" for replica in range(2))
    slowly = f"{full} --inject {','.join(slow)}"  # both, or the others would train on without the slow one
    with cluster(tmp_path, spare + 1, replica_runs.flags(corpus, EVERY, STEPS, batch=8), 2 // size, slowly) as nodes:
        nodes[0].wait_for(lambda: nodes[0].step() >= 10)
        nodes[lost].lose_power()
        done = end_of(nodes, lost, 240)
        assert f"takes the place of node {lost}, in replica 1" in nodes[spare].output()
    done.check(STEPS, 1)
    assert done.of(1, events.CAUGHT_UP), done.explain()
