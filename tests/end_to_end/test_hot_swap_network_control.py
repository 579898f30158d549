"""The node with the control plane is a node like any other: it is cut off or paused while everybody still sees the
run's directory, it loses power; another one takes over, and it comes back as a standby node."""

import json

import pytest
from ft_runs import flags
from nodes import Host, Lab, why_not
from nodes.fleet import Fleet
from test_hot_swap_network import LAYOUT, STEPS, alive, judge_losses, opened, wait_for_standbys, workers_on

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())


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
    epochs, known = len(opened(before)), names(before)
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
    return any(name.startswith(f"n{host.index}-") for name in names(fleet.so_far()) - known)


def names(run) -> set[str]:
    return {event.node for event in run.named("standby_ready")}


def seated(fleet: Fleet) -> set[str]:
    return set(fleet.so_far().named("epoch_opened")[-1].detail["seats"].values())


def controlled_by(fleet: Fleet) -> str:
    return json.loads((fleet.folder / "control.json").read_text())["node"]
