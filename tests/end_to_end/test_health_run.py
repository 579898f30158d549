"""What a node says of itself during ``ft run``: events, the status, and with --health drain where workers go."""

import os
import signal
import socket

import planted_node
from ft_runs import LONGER, ROOT, Nodes, flags, ft_run

from ft import cli
from ft.base import events

LAYOUT, STEPS = "--use-distributed-optimizer", 80


def test_a_node_with_a_memory_error_gets_no_further_worker(corpus, reference, monkeypatch, tmp_path, capsys):
    """The lost worker's node has a standby, which is preferred otherwise."""
    how = {"options": f"--standby 1 --health drain --inject {LONGER}", "nnodes": 2, "standby_nodes": 0}
    with Nodes(tmp_path, flags(corpus, LAYOUT, STEPS), **how) as nodes:
        for rank in range(2):
            monkeypatch.setenv("FT_HEALTH_ROOT", str(planted_node.plant(tmp_path / f"tree{rank}")))
            nodes.add(rank)
        log = nodes[0].folder / "events.jsonl"

        def seen(name):
            return [each for each in events.read(log) if each.name == name]

        nodes[0].wait_for(lambda: nodes[0].step() >= 1 and len(seen("standby_ready")) >= 2)
        planted_node.log(tmp_path / "tree1", "[    1.000000] EDAC MC0: 1 UE memory read error on DIMM_A1")
        nodes[0].wait_for(lambda: seen("health_found"))
        victim = seen("epoch_opened")[-1].detail["seats"]["3"]
        os.kill(next(each.detail["pid"] for each in seen("worker_started") if each.worker == victim), signal.SIGKILL)
        done = nodes[0].wait(180)
        assert done.code == 0 and nodes[1].process.wait(180) == 0, done.explain()
    (found,) = done.named("health_found")
    assert (found.node, found.detail["device"], found.detail["acts"]) == ("n1", "mc0", True)
    seats = done.named("epoch_opened")[-1].detail["seats"]
    assert seats["3"].startswith("n0.") and seats["2"].startswith("n1."), done.explain()
    assert done.losses == reference(4, LAYOUT, STEPS)
    assert cli.main(["status", str(nodes[0].folder)]) == 0
    said = f"health     n1 ({socket.gethostname()}) mc0: evict at the next step: an uncorrectable memory error: [ 1.00"
    assert said in capsys.readouterr().out


def test_a_standby_that_fails_its_check_is_ended_and_the_run_goes_on(corpus, reference, tmp_path):
    script = str(ROOT / "tests" / "helpers" / "unfit_standby_gpt.py")
    how = {"script": script, "nproc": 2, "options": f"--inject {LONGER}"}
    done = ft_run(tmp_path / "run", flags(corpus, LAYOUT, STEPS), **how)
    assert done.code == 0 and done.losses == reference(2, LAYOUT, STEPS), done.explain()
    (fault,) = done.named("fault_detected")
    assert fault.rank is None and "a copy of 16 MiB has another checksum" in fault.detail["reason"], done.explain()
    assert len(done.named("standby_ready")) == 1, "no other standby is started on this node"
    assert not done.named("restarted") and len(done.named("epoch_opened")) == 1, done.explain()
