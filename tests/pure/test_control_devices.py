"""Which devices the control plane gives to workers, on nodes that have just as many devices as workers."""

import pytest
from control_world import LIMITS, World, kinds, only, opened

from ft.base.errors import DeviceUnusable
from ft.faults import verdict
from ft.job import messages as m
from ft.job.agent.devices import FREE_S
from ft.job.control.membership import place_ranks
from ft.job.control.state import Agent, Hold


def full(nodes=2, standbys=1, more=0, **how):
    """Return a training run of 4 workers, on nodes with a device for each of their workers and ``more`` others."""
    return World(4, nodes, standbys, devices=4 // nodes + more, **how).run()


def devices(orders, ranks=range(4)):
    return [opened(orders).seats[rank].local_rank for rank in ranks]


def test_a_standby_gets_the_device_of_the_worker_it_replaces_once_that_is_free():
    world = full(nodes=1)
    assert kinds(world.kill(2)) == ["Close"]  # the standby is ready, but the memory of the device is not free
    orders = world.say(m.DeviceReleased("n0.w2", "n0", 2))
    assert opened(orders).seats[2].worker == "n0.w4" and devices(orders) == [0, 1, 2, 3]


def test_a_worker_that_is_killed_keeps_its_device_until_its_process_is_gone():
    world = full(nodes=1)
    assert kinds(world.say(m.WorkerSilent(world.worker(1), "n0", 0.3, "D"))) == ["Look", "Kill", "Close"]
    assert not world.wait(2.0)
    world.exit("n0.w1")
    assert devices(world.say(m.DeviceReleased("n0.w1", "n0", 1))) == [0, 1, 2, 3]


def test_a_free_device_is_not_waited_for():
    assert devices(full(nodes=1, more=1).kill(2)) == [0, 1, 4, 3]


def test_a_standby_on_a_full_node_cannot_replace_a_worker_of_another_node():
    world = full(standbys=2)
    orders = world.wait(LIMITS.agent_lost_s + 1, beats=["n0"])
    assert "Open" not in kinds(orders), "a standby of n0 got a device that n0 does not have"
    assert "cannot hold 4 workers" in only(orders, m.Stop).message


def test_the_standby_node_gets_the_ranks_that_a_full_node_has_no_devices_for():
    world = full(standbys=2, standby_nodes=1)
    orders = world.wait(LIMITS.agent_lost_s + 1, beats=["n0", "n2"])
    assert {opened(orders).seats[rank].node for rank in (2, 3)} == {"n2"} and devices(orders) == [0, 1, 0, 1]


def test_new_workers_are_started_only_where_there_are_devices_for_them():
    world = full(standbys=0, more=2)
    assert m.Spawn("n0", 2) in world.wait(LIMITS.agent_lost_s + 1, beats=["n0"])
    world = full(standbys=0, more=1)
    orders = world.wait(LIMITS.agent_lost_s + 1, beats=["n0"])
    assert "Spawn" not in kinds(orders) and "cannot hold 4 workers" in only(orders, m.Stop).message


def test_a_device_that_is_never_released_is_given_up_for_another():
    world = full(nodes=1, more=1, standbys=2)
    world.state.agents["n0"].unusable[4] = "it is broken"
    assert "Open" not in kinds(world.say(m.WorkerSilent(world.worker(1), "n0", 0.3, "D")))
    orders = world.wait(LIMITS.device_s + 1)
    assert "n0.w1 has not released it within" in world.events("device_unusable")[0]["reason"]
    assert "cannot hold" in only(orders, m.Stop).message
    assert LIMITS.device_s > FREE_S, "an agent that still looks at the device is not overdue"


def test_an_unsound_device_is_not_used_again():
    world = full(nodes=1, more=1)
    world.state.agents["n0"].held["earlier"] = Hold(4, world.now)
    world.kill(2)
    assert not world.say(m.DeviceReleased("n0.w2", "n0", 2, "the driver asks for a reset"))
    assert devices(world.say(m.DeviceReleased("earlier", "n0", 4))) == [0, 1, 4, 3]
    assert world.events("device_unusable") == [
        {"node": "n0", "device": 2, "reason": "the driver asks for a reset"},
    ]


def test_a_worker_that_finds_no_device_is_replaced_and_never_ends_the_run():
    world = full(nodes=1, more=1, standbys=2)
    world.kill(2)
    orders = world.fail(2, "DeviceUnusable", "FtError", message="device 4: out of memory", epoch=world.state.epoch)
    assert "Stop" not in kinds(orders) and "Restart" not in kinds(orders)
    orders += world.say(m.DeviceReleased("n0.w2", "n0", 2))
    assert devices(orders) == [0, 1, 2, 3]
    assert world.state.agents["n0"].unusable == {4: "DeviceUnusable: device 4: out of memory"}
    assert verdict.of_error([DeviceUnusable.__name__], "device 8: there is none").action == verdict.REPLACE


def test_a_worker_that_ended_and_released_its_device_before_it_was_missed_holds_nothing():
    world = full(nodes=1)
    world.exit("n0.w1", 0)
    world.say(m.DeviceReleased("n0.w1", "n0", 1))
    assert devices(world.wait(LIMITS.leave_s + 2)) == [0, 1, 2, 3]


def node(rank, seats, standbys=1, devices=0, **changes):
    return Agent(m.AgentJoined(f"n{rank}", rank, "host", seats, standbys, devices=devices), 0.0, seats, **changes)


@pytest.mark.parametrize(
    "agents, ranks",
    [
        ([node(0, 2, 2, devices=2), node(1, 2, gone="dead")], None),
        ([node(0, 2, 2, devices=4), node(1, 2, gone="dead")], {"n0": [0, 1, 2, 3]}),
        ([node(0, 4, devices=4, unusable={1: "broken"})], None),
        ([node(0, 2, devices=2, unusable={1: "broken"}), node(1, 2, 1, devices=3)], {"n0": [0], "n1": [1, 2, 3]}),
    ],
)
def test_a_restart_places_no_more_ranks_on_a_node_than_it_has_devices(agents, ranks):
    assert place_ranks(agents, 4) == ranks


def test_a_node_that_begins_with_a_broken_device_gives_a_rank_to_the_standby_node():
    world = World(4, 2, 0, standby_nodes=1, devices=2)
    world.say(m.AgentJoined("n0", 0, "host0", 2, 0, devices=2, unusable={1: "the driver asks for a reset"}))
    world.say(m.AgentJoined("n1", 1, "host1", 2, 0, devices=2))
    restart = only(world.say(m.AgentJoined("n2", 2, "host2", 0, 2, devices=2)), m.Restart)
    assert restart.ranks == {"n0": [0], "n1": [1, 2], "n2": [3]}
    assert "n0 has devices for 1 of its 2 workers (device 1: the driver asks for a reset)" in restart.reason
