"""Faults on nodes whose devices are counted: a standby has one of its own only where there is one to spare."""

import os
import signal

from ft_runs import LONGER, ROOT, Finished, Nodes, Running, flags

SCRIPT = str(ROOT / "tests" / "helpers" / "counted_devices_gpt.py")
LAYOUT, STEPS = "--use-distributed-optimizer", 40


def test_a_worker_is_replaced_on_its_own_node_if_the_standbys_node_is_full(corpus, reference, monkeypatch, tmp_path):
    """The only standby is on n0, whose devices are in use. It must not take the rank that n1 has lost."""
    monkeypatch.setenv("COUNTED_DEVICES", "2")
    how = {"options": "--devices-per-node 2 --inject kill@step=5:rank=3", "nnodes": 2, "standby_nodes": 0}
    with Nodes(tmp_path, flags(corpus, LAYOUT, STEPS), script=SCRIPT, **how) as nodes:
        for rank in range(2):
            nodes.add(rank, f"--standby {1 - rank}")
        done = nodes[0].wait(180)
        assert done.code == 0 and nodes[1].process.wait(180) == 0, done.explain()
    assert not done.named("restarted") and not done.named("device_unusable"), done.explain()
    seats = done.named("epoch_opened")[-1].detail["seats"]
    assert seats["3"].startswith("n1.") and done.named("fault_injected"), done.explain()
    log = (nodes[0].folder / "logs" / f"{seats['3']}.log").read_text()
    assert "COUNTED device 1" in log, "the device of the lost worker"
    assert done.losses == reference(4, LAYOUT, STEPS)


def test_a_standby_makes_a_spare_device_ready_and_trains_on_it(corpus, reference, monkeypatch, tmp_path):
    monkeypatch.setenv("COUNTED_DEVICES", "3")
    given = flags(corpus, LAYOUT, 3 * STEPS)
    run = Running(tmp_path / "run", SCRIPT, given, nproc=2, options=f"--devices-per-node 3 --inject {LONGER}")
    log = run.folder / "logs" / "n0.w2.log"
    run.wait_for(lambda: log.exists() and "device 2 is ready: context" in log.read_text())
    started = Finished(0, "", run.folder).named("worker_started")
    os.kill(next(event.detail["pid"] for event in started if event.rank == 1), signal.SIGKILL)
    done = run.wait()
    assert done.code == 0 and not done.named("restarted"), done.explain()
    assert done.named("epoch_opened")[-1].detail["seats"]["1"] == "n0.w2"
    assert "COUNTED device 2" in log.read_text().partition("is ready")[2]
    assert done.losses == reference(2, LAYOUT, 3 * STEPS)
