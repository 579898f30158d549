"""Training on hosts of their own, whose network fails: a bad network is no death, a node that is cut off counts for
nothing from then on and comes back as a standby, and what was trained is the same, bit for bit."""

import json
import os
import time

import pytest
from ft_runs import Finished, flags
from nodes import Host, Lab, why_not
from nodes.fleet import Fleet

from megatron.ft_trainer.checkpointing.inventory import problems, read_manifest, scan

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())

LAYOUT = "--use-distributed-optimizer --tensor-model-parallel-size 2"  # inside a node; data parallel across
STEPS, ENOUGH = 300, 200


@pytest.mark.long
def test_a_bad_network_is_no_death_and_who_lost_power_comes_back_as_a_standby(corpus, reference, tmp_path):
    ends = flags(corpus, f"{LAYOUT} --exit-interval {ENOUGH}", STEPS)
    with Lab(3, seed=4) as lab, Fleet(lab, tmp_path / "run", ends) as fleet:
        _, first, second = lab.hosts
        fleet.wait_steps(3)
        for trouble in ({"loss": 0.05}, {"delay_s": 0.01}, {"rate": 2e6}):
            first.degrade(**trouble)
            fleet.wait_steps(8)
        first.repair()
        flap(fleet, first, times=4, seconds=0.4)
        assert opened(fleet.so_far()) == [0], fleet.explain()

        wait_for_standbys(fleet, "n2")
        first.lose_power()
        fleet.wait_steps(1)
        judge_swap(fleet.so_far(), lost="n1", seated={"n0", "n2"})
        first.repair()
        second.degrade(delay_s=0.03)  # an agent's start takes a hundred steps, or fewer slow ones
        fleet.come_back(first)
        wait_for_standbys(fleet, "n1-2")
        second.lose_power()
        done = fleet.wait(lost=(2,))
    assert done.code == 0, done.explain()
    judge_swap(done, lost="n2", seated={"n0", "n1-2"})
    assert done.losses == reference(4, LAYOUT, STEPS)[:ENOUGH]


@pytest.mark.long
def test_a_node_that_was_given_up_counts_for_nothing_and_joins_as_a_standby(corpus, reference, tmp_path):
    """It holds the last logical rank, which writes the losses, and the folder of checkpoints is everybody's."""
    saves = f"--save {tmp_path}/saved --save-interval 10"
    with Lab(3) as lab, Fleet(lab, tmp_path / "run", flags(corpus, f"{LAYOUT} {saves}", STEPS)) as fleet:
        fleet.wait_steps(12)
        wait_for_standbys(fleet, "n2")
        for trouble, index, lost, heir, returns_as in (
            ("cut off", 1, "n1", "n2", "n1-2"),
            ("deaf", 2, "n2", "n1-2", "n2-2"),
            ("mute", 1, "n1-2", "n2-2", "n1-3"),
            ("paused", 2, "n2-2", "n1-3", "n2-3"),
        ):
            give_up(fleet, lab.hosts[index], trouble, lost)
            judge_swap(fleet.so_far(), lost, seated={"n0", heir})
            wait_for_standbys(fleet, returns_as)
        fleet.wait_steps(12)
        assert fleet.step() < STEPS, "the run was over first: this has shown less than it says"
        fleet.stop()
        done = fleet.so_far()
    judge_losses(done, reference(4, LAYOUT, STEPS))
    judge_checkpoints(tmp_path / "saved")


def give_up(fleet: Fleet, host: Host, trouble: str, node: str) -> None:
    """Until its ranks are others' and none of its workers is left; then the trouble is over."""
    before, workers = opened(fleet.so_far())[-1], workers_on(fleet.so_far(), node)
    if trouble == "paused":
        host.pause()
    else:
        host.cut(out=trouble != "deaf", into=trouble != "mute")
    fleet.wait_for(lambda: opened(fleet.so_far())[-1] > before, what="another epoch")
    fleet.wait_steps(3)
    if trouble == "paused":
        host.go_on()
    fleet.wait_for(lambda: not alive(workers), what=f"the end of {sorted(workers)}")
    fleet.wait_steps(3)
    host.repair()


def flap(fleet: Fleet, host: Host, times: int, seconds: float) -> None:
    for _ in range(times):
        host.cut()
        time.sleep(seconds)
        host.repair()
        fleet.wait_steps(2)


def opened(run: Finished) -> list[int]:
    return [event.epoch for event in run.named("epoch_opened")]


def wait_for_standbys(fleet: Fleet, node: str, count: int = 2) -> None:
    def ready() -> bool:
        return sum(event.node == node for event in fleet.so_far().named("standby_ready")) >= count

    fleet.wait_for(ready, what=f"standbys on {node}")


def workers_on(run: Finished, node: str) -> dict[str, int]:
    """Worker -> pid."""
    return {event.worker: event.detail["pid"] for event in run.named("worker_started") if event.node == node}


def alive(workers: dict[str, int]) -> list[str]:
    return [worker for worker, pid in workers.items() if os.path.exists(f"/proc/{pid}")]


def judge_swap(run: Finished, lost: str, seated: set[str]) -> None:
    """The last one lost was this node; the blame is its alone, and nothing was begun anew."""
    faults = [event for event in run.named("fault_detected") if event.detail["action"] == "replace"]
    assert {(event.node, event.detail["signal"]) for event in faults[-2:]} == {(lost, "node lost")}, run.explain()
    assert not run.named("restarted"), run.explain()
    seats = run.named("epoch_opened")[-1].detail["seats"]
    assert {seat.split(".")[0] for seat in seats.values()} == seated, run.explain()


def judge_losses(run: Finished, expected: list[float]) -> None:
    assert run.losses == expected[: len(run.losses)]


def judge_checkpoints(folder) -> None:
    found = scan(folder)
    assert len(found) > 3
    for entry in found:
        assert entry.complete, entry
        assert problems(folder / entry.name, read_manifest(folder / entry.name).files) == []


# --- the node with the control plane is a node like any other ---------------------------------------------------------


@pytest.mark.long
def test_whichever_node_has_the_control_plane_can_be_lost(corpus, reference, tmp_path):
    with Lab(3) as lab, Fleet(lab, tmp_path / "run", flags(corpus, LAYOUT, STEPS)) as fleet:
        fleet.wait_steps(5)
        wait_for_standbys(fleet, "n2")
        for trouble in ("cut off", "paused", "without power"):
            lose_control(fleet, lab, trouble)
            fleet.wait_steps(3)
        fleet.wait_steps(5)
        assert fleet.step() < STEPS, "the run was over first: this has shown less than it says"
        fleet.stop()
        done = fleet.so_far()
    judge_losses(done, reference(4, LAYOUT, STEPS))
    assert len(done.named("control_back")) >= 3, done.explain()  # two agents may claim one after the other


def lose_control(fleet: Fleet, lab: Lab, trouble: str) -> None:
    """Until the node is back as a standby; its ranks, if it had any, and the control plane are others' by then."""
    node, before = controlled_by(fleet), fleet.so_far()
    host, workers = lab.hosts[int(node[1])], workers_on(before, node)
    epochs, known = len(opened(before)), standbys(before)
    strike(host, trouble)
    fleet.wait_for(lambda: controlled_by(fleet) != node, what="another node's control plane")
    if seated(fleet) & set(workers):
        fleet.wait_for(lambda: len(opened(fleet.so_far())) > epochs, what="another epoch")
        assert fleet.so_far().named("fault_detected")[-1].node == node, fleet.explain()
    fleet.wait_steps(3)
    assert not seated(fleet) & set(workers), fleet.explain()
    if trouble == "paused":
        host.go_on()
    fleet.wait_for(lambda: not alive(workers), what=f"the end of {sorted(workers)}")
    host.repair()
    if trouble == "without power":
        fleet.come_back(host)
    fleet.wait_for(lambda: returned(fleet, host, known), what=f"standbys on {host.name}")


def strike(host: Host, trouble: str) -> None:
    {"cut off": host.cut, "paused": host.pause, "without power": host.lose_power}[trouble]()


def returned(fleet: Fleet, host: Host, known: set[str]) -> bool:
    """There is a standby on the host, under a name that was not known."""
    return any(name.startswith(f"n{host.index}-") for name in standbys(fleet.so_far()) - known)


def standbys(run) -> set[str]:
    return {event.node for event in run.named("standby_ready")}


def seated(fleet: Fleet) -> set[str]:
    return set(fleet.so_far().named("epoch_opened")[-1].detail["seats"].values())


def controlled_by(fleet: Fleet) -> str:
    return json.loads((fleet.folder / "control.json").read_text())["node"]
