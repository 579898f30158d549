"""The node of logical rank 0, on which the control plane begins, is a node like any other: it loses power, it is cut
off or paused while everybody still sees the run's directory."""

import json

import pytest
from ft_runs import Finished, flags
from nodes import Lab, why_not
from nodes.fleet import Fleet
from test_hot_swap_network import LAYOUT, alive, judge_losses, judge_swap, opened, wait_for_standbys, workers_on

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())

STEPS, ENOUGH = 300, 160


def test_the_first_node_loses_power_and_comes_back_as_a_standby(corpus, reference, tmp_path):
    ends = flags(corpus, f"{LAYOUT} --exit-interval {ENOUGH}", STEPS)
    with Lab(3) as lab, Fleet(lab, tmp_path / "run", ends) as fleet:
        first = lab.hosts[0]
        fleet.wait_steps(5)
        wait_for_standbys(fleet, "n2")
        first.lose_power()
        fleet.wait_steps(5)
        judge_swap(fleet.so_far(), lost="n0", seated={"n1", "n2"})
        first.mend()
        lab.hosts[2].degrade(delay_s=0.03)  # an agent's start takes a hundred steps, or fewer slow ones
        fleet.come_back(first)
        wait_for_standbys(fleet, "n0-2")
        lab.hosts[2].mend()
        done = fleet.wait()
    assert done.code == 0, done.explain()
    assert controlled_by(fleet) != "n0"
    assert done.losses == reference(4, LAYOUT, STEPS)[: ENOUGH]


def test_a_paused_first_node_is_succeeded_and_finds_that_out(corpus, reference, tmp_path):
    with Lab(3) as lab, Fleet(lab, tmp_path / "run", flags(corpus, LAYOUT, STEPS)) as fleet:
        first = lab.hosts[0]
        fleet.wait_steps(5)
        wait_for_standbys(fleet, "n2")
        before, workers = opened(fleet.so_far())[-1], workers_on(fleet.so_far(), "n0")
        first.pause()
        fleet.wait_for(lambda: opened(fleet.so_far())[-1] > before, what="another epoch")
        fleet.wait_steps(5)
        first.go_on()
        fleet.wait_for(lambda: not alive(workers), what=f"the end of {sorted(workers)}")
        wait_for_standbys(fleet, "n0-2")
        judge_swap(fleet.so_far(), lost="n0", seated={"n1", "n2"})
        assert controlled_by(fleet) != "n0"
        done = halt(fleet)
    judge_losses(done, reference(4, LAYOUT, STEPS))


def test_when_the_network_parts_one_side_goes_on_and_the_other_stops(corpus, reference, tmp_path):
    """The first node still has the control plane, and renews its lease in the directory that both sides see."""
    with Lab(3) as lab, Fleet(lab, tmp_path / "run", flags(corpus, LAYOUT, STEPS)) as fleet:
        first = lab.hosts[0]
        fleet.wait_steps(5)
        wait_for_standbys(fleet, "n2")
        workers = workers_on(fleet.so_far(), "n0")
        lab.part([first])
        fleet.wait_for(lambda: opened(fleet.so_far())[-1] > 0, what="another epoch")
        fleet.wait_for(lambda: not alive(workers), what=f"the end of {sorted(workers)}")
        fleet.wait_steps(5)
        judge_swap(fleet.so_far(), lost="n0", seated={"n1", "n2"})
        assert controlled_by(fleet) != "n0"
        first.mend()
        wait_for_standbys(fleet, "n0-2")
        done = halt(fleet)
    judge_losses(done, reference(4, LAYOUT, STEPS))


def halt(fleet: Fleet) -> Finished:
    """A few steps more have to come about; then nothing else is of interest."""
    fleet.wait_steps(5)
    assert fleet.step() < STEPS, "the run was over first: this has shown less than it says"
    fleet.stop()
    return fleet.so_far()


def controlled_by(fleet: Fleet) -> str:
    return json.loads((fleet.folder / "control.json").read_text())["node"]
