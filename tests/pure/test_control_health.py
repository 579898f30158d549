"""What the control plane makes of findings of nodes about themselves: by default nothing, with --health drain a lot."""

from dataclasses import asdict

import pytest
from control_world import World, kinds, opened

from ft.faults import verdict
from ft.faults.health import rules
from ft.job import messages as m
from ft.job.control.history import FRESH_S
from ft.platform.health import EVENT, Observation, Reading

BUG = ("AcceleratorError", "RuntimeError", "Exception")


def found(name, device="gpu7", node="n0", index=None, acts=True):
    """Return the report of the finding that an event of this name makes."""
    seen = Observation(node, device, name, 1, "", 50.0, EVENT, "as the kernel log says")
    (finding,) = rules(None, Reading(node, 50.0, (seen,)))
    values = {**asdict(finding), "index": index, "acts": acts, "node": node, "wall": 50.0, "monotonic": 5.0}
    del values["when"]
    return m.Observed("health_found", values)


def verdicts(world):
    return [(each["category"], each["action"]) for each in world.events("fault_detected")]


def test_a_finding_is_an_event_and_changes_nothing_by_default():
    world = World(4, 2, standbys=2, devices=4).run()
    assert not world.say(found("xid.95", index=1, acts=False), found("log.memory.uncorrected", "mc0", acts=False))
    assert [each["observation"] for each in world.events("health_found")] == ["xid.95", "log.memory.uncorrected"]
    agent = world.state.agents["n0"]
    assert not agent.suspect and not agent.unusable and not agent.evidence


def test_a_device_with_a_finding_gets_no_further_worker():
    world = World(4, 1, standbys=2, devices=5).run()
    assert not world.say(found("xid.79", index=4), m.DeviceReleased("", "n0", 4, "Xid 79"))
    assert world.state.agents["n0"].unusable == {4: "Xid 79"} and not world.state.agents["n0"].suspect
    assert kinds(world.kill(2)) == ["Close"], "the free device is not given away, and the seated workers go on"
    assert opened(world.say(m.DeviceReleased("n0.w2", "n0", 2))).seats[2].local_rank == 2
    assert len(world.events("device_unusable")) == 1


def test_a_node_with_a_finding_gets_no_further_workers():
    world = World(4, 2, standbys=2).run()
    assert not world.say(found("log.memory.uncorrected", "mc0", "n1"))
    assert world.state.agents["n1"].suspect.startswith("an uncorrectable memory error")
    seats = opened(world.kill(3)).seats
    assert seats[3].node == "n0" and seats[2].node == "n1", "who sits there stays"


def test_evidence_replaces_the_guess_from_an_exception():
    world = World(4, 1, standbys=2, devices=6).run()
    world.say(found("xid.95", index=2))
    world.fail(2, *BUG, message="CUDA error: device-side assert triggered", epoch=world.state.epoch)
    assert verdicts(world) == [(verdict.DEVICE, verdict.REPLACE)]
    assert 2 in world.state.agents["n0"].unusable


def test_an_innocent_device_keeps_the_verdict_of_its_own_failure():
    world = World(4, 2, standbys=2, devices=6).run()
    world.say(found("xid.95", index=1), found("xid.95", node="n1", index=0), found("xid.74", index=0, acts=False))
    world.fail(0, "RuntimeError", message="NCCL error: ncclRemoteError", epoch=world.state.epoch)
    assert verdicts(world) == [(verdict.TRANSIENT, verdict.RETRY)]
    assert not world.state.agents["n0"].unusable and not world.state.agents["n0"].suspect


def test_evidence_is_forgotten():
    world = World(4, 1, standbys=2, devices=6).run()
    world.say(found("xid.95", index=2))
    world.wait(FRESH_S + 1)
    world.fail(2, "RuntimeError", message="NCCL error: ncclRemoteError", epoch=world.state.epoch)
    assert verdicts(world) == [(verdict.TRANSIENT, verdict.RETRY)]


@pytest.mark.parametrize("changes", [{"node": "n9"}, {"advice": None}])
def test_a_finding_of_an_unknown_node_or_of_another_version_is_only_logged(changes):
    world = World(4, 1).run()
    report = found("xid.95", index=2)
    values = {name: value for name, value in {**report.detail, **changes}.items() if value is not None}
    if "advice" not in values:
        values["advice"] = ""
        del values["source"]
    assert not world.say(m.Observed("health_found", values))
    assert len(world.events("health_found")) == 1 and not world.state.agents["n0"].evidence
