"""Peer copies on other nodes, end to end: with the default order of ranks the data-parallel peers share a node, and a
node's loss takes whole data-parallel groups; their state comes from copies that other groups' ranks hold."""

import os
import signal

import pytest
from ft_runs import Nodes, flags, ft_run

LAYOUT = "--use-distributed-optimizer --pipeline-model-parallel-size 2"
STEPS = 120


@pytest.mark.long
def test_a_node_with_whole_data_parallel_groups_is_recovered_from_copies_elsewhere(corpus, reference, tmp_path):
    topology = tmp_path / "topology"
    topology.write_text("n0 rack=a\nn1 rack=b\nn2 rack=b\n")
    with Nodes(tmp_path, flags(corpus, LAYOUT, STEPS), 3, f"--topology {topology}") as nodes:
        first = nodes[0]
        first.wait_for(lambda: first.step() >= 5)
        os.kill(nodes[1].process.pid, signal.SIGKILL)
        done = first.wait(180)
        assert done.code == 0, done.explain()
        assert nodes[2].process.wait(180) == 0
    assert not done.named("restarted"), done.explain()
    placed = done.named("copies_placed")
    assert len(placed) == 2 and all(not event.detail["problems"] for event in placed), done.explain()
    for event in placed:
        assert all((int(owner) < 2) != (held[0] < 2) for owner, held in event.detail["copies"].items())
    restored = done.named("state_restored")[-1]
    assert {restored.detail["sources"][rank] for rank in "23"} == {"copy:0", "copy:1"}, done.explain()
    assert {restored.detail["replicated"][rank] for rank in "23"} == {"none"}
    assert "this node in rack a" in done.output
    assert done.losses == reference(4, LAYOUT, STEPS)


def test_a_strict_run_that_cannot_keep_copies_apart_does_not_start(corpus, tmp_path):
    done = ft_run(tmp_path / "run", flags(corpus, "--ft-snapshot-strict", 4), nproc=2, standby=0)
    assert done.code == 2, done.explain()
    assert "--ft-snapshot-strict: peer copies cannot be placed as asked" in done.output
    assert "logical rank(s) 0-1: their state and the only copy of it are in node n0" in done.output
    assert not done.named("resumed"), done.explain()
