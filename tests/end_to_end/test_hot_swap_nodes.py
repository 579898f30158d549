"""The loss of a whole node: its agent and all its workers at once, with another node's standbys in their place."""

import os
import signal
import socket
import time

import pytest
from ft_runs import Finished, Nodes, Running, flags

from ft.observe.report.record import load
from ft.observe.report.status import status

# Data-parallel peers on different nodes, so that no node holds a state and its only copy.
LAYOUT = "--use-distributed-optimizer --pipeline-model-parallel-size 2 --use-tp-pp-dp-mapping"
STEPS = 120


@pytest.mark.parametrize(
    "lost",
    [
        pytest.param(1, id="a node"),
        pytest.param(0, id="the node of the control plane and of rank 0", marks=pytest.mark.long),
    ],
)
def test_a_standby_node_takes_a_lost_nodes_place(lost, corpus, reference, tmp_path):
    with Nodes(tmp_path, flags(corpus, LAYOUT, STEPS), 3) as nodes:
        stays = nodes[1 - lost]
        stays.wait_for(lambda: stays.step() >= 5)
        os.kill(nodes[lost].process.pid, signal.SIGKILL)
        done = stays.wait(180)
        assert done.code == 0, done.explain()
        assert nodes[2].process.wait(180) == 0
    signals = {fault.detail["signal"] for fault in done.named("fault_detected")}  # connections to it may be lost first
    assert "node lost" in signals and not done.named("restarted"), done.explain()
    seats = done.named("epoch_opened")[-1].detail["seats"]
    assert {seat.split(".")[0] for seat in seats.values()} == {f"n{1 - lost}", "n2"}
    assert done.losses == reference(4, LAYOUT, STEPS)
    assert_named(f"n{lost}", done, stays.output())


@pytest.mark.parametrize(
    ("layout", "end", "sources", "replicated"),
    [
        (LAYOUT, "segfault", ("copy:0", "copy:2"), ("none", "none")),
        (LAYOUT.removeprefix("--use-distributed-optimizer "), "kill", ("copy:0", "copy:0"), ("peer:0", "peer:0")),
    ],
)
def test_workers_that_live_serve_what_crashed_ones_of_their_node_have_left(
    layout, end, sources, replicated, corpus, reference, tmp_path
):
    """Ranks 1 and 3 hold each other's copies. Both go to standbys of another node. If 3 is killed, all is left by 1."""
    faults = f"segfault@step=7:rank=1:phase=backward,{end}@step=6:rank=3:phase=leave"
    with Nodes(tmp_path, flags(corpus, layout, 20), 3, options=f"--inject {faults}") as nodes:
        done = nodes[0].wait(180)
    assert done.code == 0 and not done.named("restarted"), done.explain()
    assert {done.named("epoch_opened")[-1].detail["seats"][rank].split(".")[0] for rank in "13"} == {"n2"}
    assert done.losses == reference(4, layout, 20)
    restored = done.named("state_restored")[-1].detail
    if restored["sources"]["1"] == "copy:3":
        pytest.skip("the standby had fetched the copy of rank 1 from rank 3 before that crashed")
    assert tuple(restored["sources"][rank] for rank in "13") == sources, done.explain()
    assert tuple(restored["replicated"][rank] for rank in "13") == replicated, done.explain()


@pytest.mark.long
def test_a_node_that_was_lost_comes_back_as_a_standby_and_takes_the_next_ones_place(corpus, reference, tmp_path):
    steps = 500
    with Nodes(tmp_path, flags(corpus, LAYOUT, steps), 3) as nodes:
        first = nodes[0]
        first.wait_for(lambda: first.step() >= 5)
        os.kill(nodes[1].process.pid, signal.SIGKILL)
        nodes.add(1)
        first.wait_for(lambda: ready_on("n1-2", first) == 2 and is_replaced("n1", first))
        os.kill(first.process.pid, signal.SIGKILL)
        done = nodes[2].wait(180)
        assert done.code == 0 and nodes[3].process.wait(180) == 0, done.explain()
    assert not done.named("restarted")
    assert {seat.split(".")[0] for seat in done.named("epoch_opened")[-1].detail["seats"].values()} == {"n2", "n1-2"}
    assert done.losses == reference(4, LAYOUT, steps)


def assert_named(lost: str, done: Finished, at_terminal: str) -> None:
    """Assert that terminal and status name the lost node with its host, and no rank instead of it."""
    named = f"node {lost} ({socket.gethostname()}) is lost"
    fault = next(line for line in at_terminal.splitlines() if line.startswith("   fault "))
    assert fault.split(maxsplit=1)[1].startswith(f"{named}, with logical ranks "), done.explain()
    found = status(load(done.folder), time.time())
    assert found["last_recovery"]["headline"].startswith(named), done.explain()
    assert [one["node"] for one in found["lost"]] == [lost], done.explain()


def ready_on(node: str, run: Running) -> int:
    """Standbys that wait on a node."""
    found = Finished(0, "", run.folder).named("standby_ready")
    return len({event.worker for event in found if event.node == node})


def is_replaced(node: str, run: Running) -> bool:
    """Whether the ranks of a lost node have been taken by others, and training goes on."""
    seen = Finished(0, "", run.folder)
    opened, resumed = seen.named("epoch_opened")[-1], seen.named("resumed")[-1]
    seats = {seat.split(".")[0] for seat in opened.detail["seats"].values()}
    return node not in seats and resumed.monotonic > opened.monotonic
