"""Training on hosts of their own, whose network fails: a bad network is no death, a node that is cut off counts for
nothing from then on, and what was trained is the same, bit for bit."""

import os
import time

import pytest
from ft_runs import Finished, flags
from nodes import Host, Lab, why_not
from nodes.fleet import Fleet

from megatron.training.checkpointing.verify import problems, read_manifest, scan

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())

LAYOUT = "--use-distributed-optimizer --tensor-model-parallel-size 2"  # inside a node; data parallel across
STEPS = 100


def test_a_bad_network_is_no_death_and_the_loss_of_power_is_one(corpus, reference, tmp_path):
    with Lab(3, seed=4) as lab, Fleet(lab, tmp_path / "run", flags(corpus, LAYOUT, STEPS)) as fleet:
        victim = lab.hosts[1]
        fleet.wait_steps(3)
        for trouble in ({"loss": 0.05}, {"delay_s": 0.01}, {"rate": 2e6}):
            victim.degrade(**trouble)
            fleet.wait_steps(8)
        victim.mend()
        flap(fleet, victim, times=4, seconds=0.4)
        assert opened(fleet.so_far()) == [0], fleet.explain()
        wait_for_standbys(fleet)
        victim.lose_power()
        done = fleet.wait(lost=(1,))
    assert done.code == 0, done.explain()
    judge_swap(done, "n1")
    assert done.losses == reference(4, LAYOUT, STEPS)


@pytest.mark.parametrize("trouble", ["nothing gets out", "nothing gets in", "paused"])
def test_a_node_that_was_given_up_counts_for_nothing(corpus, reference, tmp_path, trouble):
    """It holds the last logical rank, which writes the losses."""
    saves = f"--save {tmp_path}/saved --save-interval 10 --async-save"
    with Lab(3) as lab, Fleet(lab, tmp_path / "run", flags(corpus, f"{LAYOUT} {saves}", STEPS)) as fleet:
        victim = lab.hosts[1]
        fleet.wait_steps(12)
        wait_for_standbys(fleet)
        of_old = workers_on(fleet.so_far(), "n1")
        if trouble == "paused":
            victim.pause()
        else:
            victim.cut(out=trouble == "nothing gets out", into=trouble == "nothing gets in")
        fleet.wait_for(lambda: opened(fleet.so_far())[-1] > 0, what="another epoch")
        at = fleet.step()
        fleet.wait_steps(12)
        if trouble == "paused":
            victim.go_on()
        else:
            victim.mend()
        fleet.wait_for(lambda: not alive(of_old), what=f"the end of {sorted(of_old)} on n1")
        assert fleet.step() < STEPS, "the run was over first: this has shown nothing"
        done = fleet.wait()
    assert done.code == 0, done.explain()
    judge_swap(done, "n1")
    assert at <= done.named("state_restored")[0].step + 1, "the node that was given up has gone on"
    assert done.losses == reference(4, LAYOUT, STEPS)
    judge_checkpoints(tmp_path / "saved")


def flap(fleet: Fleet, host: Host, times: int, seconds: float) -> None:
    for _ in range(times):
        host.cut()
        time.sleep(seconds)
        host.mend()
        fleet.wait_steps(2)


def opened(run: Finished) -> list[int]:
    return [event.epoch for event in run.named("epoch_opened")]


def wait_for_standbys(fleet: Fleet, count: int = 2) -> None:
    fleet.wait_for(lambda: len(fleet.so_far().named("standby_ready")) >= count, what="a standby")


def workers_on(run: Finished, node: str) -> dict[str, int]:
    """Worker -> pid."""
    return {event.worker: event.detail["pid"] for event in run.named("worker_started") if event.node == node}


def alive(workers: dict[str, int]) -> list[str]:
    return [worker for worker, pid in workers.items() if os.path.exists(f"/proc/{pid}")]


def judge_swap(done: Finished, node: str) -> None:
    """One node was lost, once, and the standby node's workers sit in its place; the blame is that node's alone."""
    faults = [event for event in done.named("fault_detected") if event.detail["action"] == "replace"]
    assert {(event.node, event.detail["signal"]) for event in faults} == {(node, "node lost")}, done.explain()
    assert not done.named("restarted"), done.explain()
    seats = done.named("epoch_opened")[-1].detail["seats"]
    assert {seat.split(".")[0] for seat in seats.values()} == {"n0", "n2"}
    assert len(done.named("epoch_opened")) <= 3, done.explain()  # its neighbours may have lost their connections first


def judge_checkpoints(folder) -> None:
    found = scan(folder)
    assert [entry.step for entry in found] == list(range(10, STEPS + 1, 10))
    for entry in found:
        assert entry.complete, entry
        assert problems(folder / entry.name, read_manifest(folder / entry.name).files) == []
