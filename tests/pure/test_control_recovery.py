"""The control plane's decisions on failures: hand-made histories, each with its decision and the reason for it."""

from dataclasses import replace

import pytest
from control_world import LIMITS, World, kinds, only, opened

from ft.faults.verdict import USER_CODE
from ft.job import messages as m
from ft.job.control.history import MOST_RETRIES
from ft.job.control.state import CLOSED, ENDED, GATHERING, OPENED, RUNNING


def test_a_killed_worker_is_replaced_by_the_standby_in_one_decision():
    world = World().run()
    orders = world.kill(2)
    assert kinds(orders) == ["Close", "Open"]
    assert orders[0] == m.Close(0, "n0.w2 (logical rank 2): killed by SIGKILL")
    assert orders[1].epoch == 1 and orders[1].joiners == [2] and not orders[1].fresh
    assert orders[1].seats[2] == m.Seat("n0.w4", "n0", "n0.w4:1", 2)
    assert orders[1].seats[0].worker == "n0.w0"
    assert "n0.w4 takes logical rank 2 (same node)" in world.reasons


def test_the_whole_recovery_and_a_new_standby_only_at_its_end():
    world = World().run()
    world.kill(2)
    assert world.release(0, 1) == []
    assert world.arrive() == []
    repair = only(world.release(3), m.Repair)
    assert repair.step == 5
    assert repair.sources[2] == m.Source(owned=3, replicated=3)
    assert repair.sources[0] == m.Source(0, 0)
    assert (repair.rebuild, repair.defer) == (["world", "pair2"], [])
    assert world.repair(0, 1, 2) == []
    assert world.repair(3) == [m.Resume(1, 5)]
    assert world.resume() == [m.Spawn("n0", 1)]
    assert world.state.phase == RUNNING
    counts = {name: world.events("groups_rebuilt")[0][name] for name in ("rebuilt", "kept", "deferred")}
    assert counts == {"rebuilt": 2, "kept": 1, "deferred": 0}


def test_where_nodes_stand_is_in_every_map_and_who_held_which_copy_in_every_repair():
    world = World(nodes=2, standby_nodes=1)
    for i, (node, standbys) in enumerate(world.standbys_of.items()):
        seats = world.seats_per_node if i < 2 else 0
        world.say(m.AgentJoined(node, i, f"host{i}", seats, standbys, domains={"rack": f"r{i}"}))
    world.begin(world.start_workers())
    for rank in range(4):
        world.say(m.Observed("layout", {"copies": {str(rank): [(rank + 2) % 4]}}))
    orders = world.kill(2)
    seats = opened(orders).seats
    assert {rank: seat.domains["rack"] for rank, seat in seats.items() if rank < 2} == {0: "r0", 1: "r0"}
    world.release(0, 1, 3)
    repair = only(world.arrive(), m.Repair)
    assert repair.copies == {0: [2], 1: [3], 2: [0], 3: [1]}
    assert m.decode(m.encode(repair)) == repair


def test_the_events_of_a_recovery_come_in_their_order():
    world = World().run()
    before = len(world.decisions)
    world.kill(2)
    world.recover()
    names = [note.name for decision in world.decisions[before:] for note in decision.events]
    wanted = ["fault_detected", "worker_lost", "epoch_closed", "epoch_opened", "released", "joiner_arrived"]
    wanted += ["repair_ordered", "groups_rebuilt", "state_restored", "invariants_checked", "resumed"]
    assert names[: len(wanted)] == wanted
    detected = world.events("fault_detected")[0]
    assert detected["rank"] == 2 and detected["action"] == "replace" and detected["signal"] == "SIGKILL"
    assert detected["category"] == "PCIe / host / kernel fault" and detected["step"] == 5


def test_without_a_standby_one_is_started_first():
    world = World(standbys=0).run()
    orders = world.kill(1)
    assert orders == [m.Close(0, orders[0].reason), m.Spawn("n0", 1)]
    assert world.state.phase == CLOSED
    assert "no standby is ready for logical rank 1" in world.reasons
    (name,) = world.start_spawned(orders)
    assert opened(world.ready(name)).seats[1].worker == name


def test_a_standby_that_is_starting_is_waited_for():
    world = World(standbys=0).run()
    world.join()
    agent = world.state.agents["n0"]
    agent.joined = replace(agent.joined, standbys=1)
    name = world.start_worker("n0")
    assert kinds(world.kill(1)) == ["Close"]
    assert "are starting" not in world.last and world.state.phase == CLOSED
    assert kinds(world.ready(name)) == ["Open"]


def test_two_at_once():
    world = World(standbys=2).run()
    assert kinds(world.kill(0)) == ["Close", "Open"]
    orders = world.kill(2)
    assert kinds(orders) == ["Close", "Open"]
    assert orders[1].epoch == 2 and orders[1].joiners == [0, 2]
    assert kinds(world.recover()) == ["Repair", "Resume", "Spawn"]
    assert world.state.phase == RUNNING and world.state.recovery is None


def test_two_at_once_and_one_standby():
    world = World().run()
    world.kill(0)
    orders = world.kill(2)
    assert kinds(orders) == ["Close", "Spawn"]
    (name,) = world.start_spawned(orders)
    assert opened(world.ready(name)).joiners == [0, 2]


def test_a_failure_while_survivors_leave():
    world = World(standbys=2).run()
    world.kill(2)
    world.release(0)
    orders = world.kill(3)
    assert opened(orders).joiners == [2, 3]
    assert "a failure while opened" in world.reasons
    assert world.release(0, epoch=0) == []
    assert "has yet to leave epoch 1" in world.last


def test_a_joiner_that_dies_while_it_assembles_is_replaced():
    world = World(standbys=2).run()
    world.kill(2)
    orders = world.kill(2, code=1)
    assert kinds(orders) == ["Close", "Open"]
    assert orders[1].seats[2].worker == "n0.w5"
    assert "it had only just taken the seat" in world.reasons


def test_joiners_that_fail_alike_again_and_again_lead_to_a_restart():
    world = World(standbys=4).run()
    world.kill(2)
    world.kill(2, code=1)
    world.kill(2, code=1)
    assert kinds(world.kill(2, code=1)) == ["Restart"]
    assert "2 replacements failed alike at step 5" in world.reasons


def test_a_failure_during_repair():
    world = World(standbys=2).run()
    world.kill(2)
    world.release()
    world.arrive()
    world.repair(0, 1)
    orders = world.kill(1)
    assert opened(orders).joiners == [1, 2]
    world.recover()
    assert world.state.phase == RUNNING and world.state.epoch == 2


def test_what_was_repaired_before_the_failure_is_repaired_again():
    world = World(standbys=2).run()
    world.kill(2)
    world.release()
    world.arrive()
    stale = world.state.repair
    world.repair(0)
    world.kill(1)
    repaired = m.WorkerRepaired(world.worker(3), 1, 3, 5, "t", [], 1, 1, 0, {}, 0.0, 0.0)
    assert world.say(repaired) == []
    assert "ignored: n0.w3 is repaired for epoch 1" in world.last
    repair = only(world.release() + world.arrive(), m.Repair)
    assert repair.epoch == stale.epoch + 1


def test_a_failure_before_the_first_step():
    world = World(standbys=2).run()
    world.kill(2)
    world.release()
    world.arrive()
    world.repair()
    orders = world.kill(0)
    assert opened(orders).joiners == [0]
    assert "a failure while resuming" in world.reasons


def test_an_idle_standby_dies_and_is_made_good():
    world = World().run()
    assert world.exit("n0.w4") == [m.Spawn("n0", 1)]
    assert world.events("worker_lost")[0]["worker"] == "n0.w4"
    assert world.state.phase == RUNNING


def test_standbys_that_never_come_up_are_given_up():
    world = World().run()
    orders = world.exit("n0.w4")
    for _ in range(3):
        (name,) = world.start_spawned(orders)
        orders = world.exit(name, 1, attached=False)
    assert orders == []
    assert "3 standbys in a row ended before they were ready" in world.reasons
    assert world.wait(20) == []


def test_seats_for_which_nobody_comes_up_lead_to_a_restart():
    world = World(standbys=0).run()
    orders = world.kill(1)
    for _ in range(3):
        (name,) = world.start_spawned(orders)
        orders = world.exit(name, 1, attached=False)
    assert kinds(orders) == ["Restart"]
    assert "no worker comes up for the empty seats" in world.reasons


def test_workers_that_were_ordered_and_never_start_are_ordered_again():
    world = World(standbys=0).run()
    world.kill(1)
    assert kinds(world.wait(LIMITS.ready_s + 1)) == ["Spawn"]
    assert "were not started within" in world.reasons


def test_a_node_is_lost_with_all_its_workers():
    world = World(world_size=4, nodes=2, standbys=2).run()
    orders = world.wait(LIMITS.agent_lost_s + 1, beats=["n0"])
    assert kinds(orders)[-2:] == ["Close", "Open"]
    assert {order.worker for order in orders if isinstance(order, m.Kill)} == {"n1.w0", "n1.w1", "n1.w2", "n1.w3"}
    assert opened(orders).joiners == [2, 3]
    assert {opened(orders).seats[rank].worker for rank in (2, 3)} == {"n0.w2", "n0.w3"}
    assert [opened(orders).seats[rank].local_rank for rank in (2, 3)] == [2, 3]
    assert "nothing was heard of its agent" in world.reasons


def test_a_lost_node_is_named_with_its_host():
    world = World(world_size=4, nodes=2, standbys=2).run()
    for node, host in (("n0", "gpu0136"), ("n1", "gpu0137")):
        agent = world.state.agents[node]
        agent.joined = replace(agent.joined, machine=host)
    orders = world.wait(LIMITS.agent_lost_s + 1, beats=["n0"])
    assert "node n1 (gpu0137) is lost: nothing was heard of its agent" in only(orders, m.Close).reason


def test_a_lost_node_s_ranks_go_where_fewest_are_at_work():
    world = World(world_size=4, nodes=2, standbys=2, standby_nodes=1).run()
    orders = world.wait(LIMITS.agent_lost_s + 1, beats=["n0", "n2"])
    assert {opened(orders).seats[rank].worker.split(".")[0] for rank in (2, 3)} == {"n2"}
    assert [opened(orders).seats[rank].local_rank for rank in (2, 3)] == [0, 1]


def test_both_copies_are_lost_with_a_node():
    world = World(world_size=4, nodes=2, standbys=2).run()
    orders = world.wait(LIMITS.agent_lost_s + 1, beats=["n0"])
    assert opened(orders).joiners == [2, 3]
    world.release()
    order = only(world.arrive(), m.Restart)
    assert "of step 5, nobody has all that logical rank(s) 2, 3 need" in order.reason


def test_a_lost_node_gives_its_ranks_to_a_standby_node_in_a_restart():
    world = World(world_size=4, nodes=2, standbys=0, standby_nodes=1).run()
    world.wait(LIMITS.agent_lost_s + 1, beats=["n0", "n2"])
    world.release()
    order = only(world.arrive(), m.Restart)
    assert order.ranks == {"n0": [0, 1], "n2": [2, 3]}


def test_when_no_agent_is_heard_of_it_is_this_side_that_was_away():
    world = World(world_size=4, nodes=2).run()
    assert world.wait(60, beats=[]) == []


def test_an_agent_that_ends_without_a_signal_is_a_lost_node():
    world = World(world_size=4, nodes=2, standbys=2).run()
    assert kinds(world.say(m.AgentLeaving("n1", 0)))[-2:] == ["Close", "Open"]
    assert world.say(m.WorkerExited("n1.w0", "n1", -9, True)) == []


def test_silence_is_a_hang():
    world = World().run()
    orders = world.say(m.WorkerSilent(world.worker(1), "n0", 0.3, "T"))
    assert orders[1] == m.Kill("n0.w1", "no heartbeat for 0.3 s, its process is stopped")
    assert kinds(orders) == ["Look", "Kill", "Close", "Open"]
    assert world.exit("n0.w1") == [] and "known to be gone" in world.last


def test_a_stall_is_a_hang_when_others_wait():
    world = World().run()
    waits = {"doing": "wait", "where": "pair0", "since_s": 12.0}
    hung = {"since_s": 11.0}
    world.beat(all={}, r0=waits, r1=hung)
    orders = world.wait(0.3) + world.looked(((1,), "busy"), waiting=(0,))
    assert kinds(orders) == ["Look", "Kill", "Close", "Open"] and orders[1].worker == "n0.w1"
    assert "while others wait for it (limit 10.3 s)" in world.reasons


def test_a_long_step_in_which_nobody_waits_is_none():
    world = World().run()
    world.beat(all={"since_s": 200.0})
    assert world.wait(1) == []


def test_the_first_step_may_take_long():
    world = World().run()
    world.beat(all={"step_s": None}, r0={"doing": "wait"}, r1={"since_s": 200.0})
    assert world.wait(1) == []


def test_when_all_wait_for_long_everybody_starts_over_in_place():
    world = World().run()
    world.beat(all={"doing": "wait", "where": "world", "since_s": 16.0})
    orders = world.wait(0.3) + world.looked(((2,), "mismatch"), waiting=range(4))
    assert kinds(orders) == ["Look", "Close", "Open"] and orders[2].joiners == []
    assert "everybody keeps the seat" in world.reasons
    (fault,) = world.events("fault_detected")
    assert fault["rank"] == 2 and "mismatch, as the look shows" in fault["reason"]


def test_a_rank_that_starts_the_same_wrong_operation_again_and_again_is_replaced_and_none_that_waits_for_it():
    world = World().run()
    for attempt in range(3):
        world.beat(step=5 + attempt, all={"doing": "wait", "where": "world", "since_s": 16.0})
        orders = world.wait(0.3) + world.looked(((2,), "mismatch"), waiting=range(4))
        killed = [order.worker for order in orders if isinstance(order, m.Kill)]
        assert killed == (["n0.w2"] if attempt == 2 else [])
        world.recover(step=5 + attempt)


def test_a_verdict_on_a_hang_waits_for_the_look_and_only_so_long():
    world = World().run()
    world.beat(all={}, r0={"doing": "wait", "where": "pair0", "since_s": 12.0}, r1={"since_s": 11.0})
    assert kinds(world.wait(LIMITS.look_s)) == ["Look"]
    assert kinds(world.wait(0.3)) == ["Kill", "Close", "Open"]


@pytest.mark.parametrize("doing", ["compute", "aside", "idle"])
def test_who_only_waits_by_the_look_is_not_killed_whatever_its_heartbeats_say(doing):
    world = World().run()
    world.beat(all={"doing": "wait", "since_s": LIMITS.start_s}, r1={"doing": doing, "since_s": LIMITS.start_s + 1.0})
    world.wait(0.3)
    orders = world.looked(((3,), "missing-call"), waiting=(0, 1, 2, 3))
    assert kinds(orders) == ["Close", "Open"] and orders[1].joiners == []
    assert world.events("fault_detected")[0]["rank"] == 3


def test_ranks_that_wait_for_one_that_saves_for_long_wait_on():
    world = World().run()
    saves = {"doing": "aside", "where": "save", "since_s": LIMITS.start_s - 40.0}
    idle = {"doing": "idle", "where": "between", "since_s": LIMITS.start_s + 1.0}
    world.beat(all={"doing": "wait", "where": "checkpoint", "since_s": 200.0}, r2=saves, r1=idle)
    world.wait(0.3)
    assert world.looked(((2,), "busy"), waiting=(0, 1, 3)) == [], "rank 2 works, and has a limit of its own"
    world.beat(all={"doing": "wait", "where": "checkpoint", "since_s": 200.0}, r2=saves)
    assert kinds(world.wait(30.0)) == []
    world.beat(all={"doing": "wait", "where": "checkpoint"}, r2={**saves, "since_s": LIMITS.start_s + 1.0})
    orders = world.wait(0.3) + world.looked(((2,), "busy"), waiting=(0, 1, 3))
    assert [order.worker for order in orders if isinstance(order, m.Kill)] == ["n0.w2"]


def test_a_rank_and_the_only_holder_of_its_copy_are_not_killed_in_one_verdict():
    world = World(standbys=2).run()
    world.say(m.Observed("layout", {"copies": {"0": [1], "1": [0], "2": [3], "3": [2]}}))
    hung = {"doing": "compute", "since_s": 30.0}
    world.beat(all={"doing": "wait", "since_s": 30.0}, r0=hung, r1=hung)
    world.wait(0.3)
    orders = world.looked(((0,), "busy"), ((1,), "busy"), waiting=(2, 3))
    assert kinds(orders) == ["Close", "Open"] and orders[1].joiners == []
    world.release(1, 2, 3)
    late = world.wait(LIMITS.drain_s + 1.0)
    assert [order.worker for order in late if isinstance(order, m.Kill)] == ["n0.w0"], "who does not leave is replaced"


def test_a_lost_connection_waits_for_the_death_behind_it():
    world = World().run()
    assert world.say(m.WorkerSuspects(world.worker(0), 0, "world", "Connection closed by peer")) == []
    assert kinds(world.kill(1)) == ["Close", "Open"]
    assert world.wait(5) == [], "the suspicion went with the epoch"


def test_a_lost_connection_with_nobody_dead_is_retried_in_place():
    world = World().run()
    for rank in (0, 1):
        world.say(m.WorkerSuspects(world.worker(rank), 0, "world", "Connection closed by peer"))
    orders = world.wait(1)
    assert kinds(orders) == ["Look", "Close", "Open"] and orders[2].joiners == []
    assert "nobody has died" in orders[1].reason
    assert kinds(world.recover()) == ["Repair", "Resume"]


def test_a_recoverable_error_is_retried_in_place():
    world = World().run()
    orders = world.fail(1, "RecoverableError")
    assert kinds(orders) == ["Close", "Open"] and orders[1].joiners == []
    repair = only(world.release(), m.Repair)
    assert repair.rebuild == [] and repair.sources[1] == m.Source(1, 1)


def test_a_recoverable_error_that_repeats_is_elevated():
    world = World().run()
    for _ in range(2):
        world.fail(1, "RecoverableError")
        world.recover()
    orders = world.fail(1, "RecoverableError")
    assert kinds(orders) == ["Kill", "Close", "Open"] and orders[2].joiners == [1]
    assert "retried 2 times in vain, no longer taken for transient" in world.reasons


def test_recoverable_errors_far_apart_are_not_elevated():
    world = World().run()
    for step in (5, 25, 45, 65):
        world.beat(step)
        assert opened(world.fail(1, "RecoverableError", step=step)).joiners == []
        world.recover(step)
        world.now += 100
        world.beat(step)


def test_a_node_that_is_at_fault_gets_no_new_worker():
    world = World(world_size=4, nodes=2, standbys=1).run()
    orders = world.fail(0, "ReplaceNodeError", message="ECC")
    assert opened(orders).seats[0] == m.Seat("n1.w2", "n1", "n1.w2:1", 2)
    world.exit("n0.w2")
    assert world.recover()[-1] == m.Spawn("n1", 1)
    assert "another node, because ReplaceNodeError: ECC" in world.reasons


def test_a_standby_of_a_sound_node_comes_before_one_of_a_suspect_node():
    world = World(world_size=4, nodes=2, standbys=1).run()
    world.state.agents["n0"].suspect = "its NIC fails"
    assert opened(world.kill(0)).seats[0].worker == "n1.w2"
    assert opened(world.kill(0)).seats[0].worker == "n0.w2"
    assert "its node is suspect, but no other has a standby: its NIC fails" in world.reasons


def test_a_software_error_restarts_from_the_checkpoint_and_again_stops():
    world = World().run()
    order = only(world.fail(1, "ValueError", message="bad shape"), m.Restart)
    assert order == m.Restart(1, "n0.w1 (logical rank 1): ValueError: bad shape", {"n0": [0, 1, 2, 3]})
    assert world.state.phase == GATHERING
    world.begin(world.start_workers(), step=5)
    assert world.state.epoch == 1 and world.state.phase == RUNNING
    stop = only(world.fail(1, "ValueError", message="bad shape"), m.Stop)
    assert stop.code == 1 and "bad shape" in stop.message
    assert "the same error as before the warm restart, again after step 5" in world.reasons


def test_another_error_after_a_restart_restarts_again_until_restarts_are_used_up():
    world = World(max_restarts=2).run()
    for number, message in enumerate(("bad shape", "bad type"), start=1):
        assert only(world.fail(1, "ValueError", message=message), m.Restart).number == number
        world.begin(world.start_workers(), step=5)
    stop = only(world.fail(1, "ValueError", message="bad device"), m.Stop)
    assert "2 warm restart(s) are allowed and used up" in stop.message


def test_old_workers_are_nobody_after_a_restart():
    world = World().run()
    old = world.worker(0)
    world.fail(1, "ValueError")
    world.start_workers(ready=False)
    assert world.exit(old) == [] and "known to be gone" in world.last
    assert world.state.phase == GATHERING and len(world.state.workers) == 4


def test_both_copies_lost_leads_to_a_restart():
    world = World(standbys=2).run()
    world.kill(2)
    world.kill(3)
    world.release()
    order = only(world.arrive(), m.Restart)
    assert order.reason.startswith("both copies lost: of step 5")


def test_without_data_parallelism_the_copy_has_all():
    world = World(dp=False).run()
    world.kill(2)
    repair = only(world.release() + world.arrive(), m.Repair)
    assert repair.sources[2] == m.Source(3, 3)


def test_a_copy_that_is_damaged_leads_to_the_step_before():
    world = World().run()
    world.kill(2)
    both = {rank: m.Holdings([4, 5], {rank ^ 1: [4, 5]}) for rank in range(4)}
    assert only(world.release(holdings=both) + world.arrive(), m.Repair).step == 5
    orders = world.fail(2, "FallbackError", message="no usable snapshot of step 5")
    assert kinds(orders) == ["Close", "Open"]
    assert only(world.release(holdings=both), m.Repair).step == 4


def test_a_damaged_copy_and_no_other_step_leads_to_a_restart():
    world = World().run()
    world.kill(2)
    world.release()
    world.arrive()
    world.fail(2, "FallbackError", message="no usable snapshot of step 5")
    order = only(world.release(), m.Restart)
    assert "step(s) 5 are unusable" in order.reason


@pytest.mark.parametrize(
    "change, invariant",
    [
        ({"topology": "another"}, "I1 (topology consistency): ranks 0, 1, 3 see topology topology, but ranks 2 see"),
        ({"rank": 1}, "I1 (topology consistency): n0.w4 in seat 2 says it is rank 1"),
        ({"shards": ["optimizer 1"]}, "I2 (shard completeness): optimizer 1 is owned by ranks 1, 2"),
        ({"shards": []}, "I2 (shard completeness): nobody owns optimizer 2"),
        ({"sources": {}}, "I3 (optimizer availability): rank 2 has no source"),
        ({"step": 4}, "I4 (step atomicity): rank 2 is at step 4, all go on from 5"),
    ],
)
def test_a_violated_invariant_stops_the_run(change, invariant):
    world = World().run()
    world.kill(2)
    world.release()
    world.arrive()
    stop = only(world.repair(r2=change), m.Stop)
    assert stop.code == 1 and invariant in stop.message
    assert any(invariant in said for said in world.events("invariants_checked")[0]["violations"])
    assert world.state.phase == ENDED


def test_a_survivor_that_does_not_leave_is_replaced():
    world = World(standbys=2).run()
    world.kill(2)
    world.release(0, 1)
    world.arrive()
    orders = world.wait(LIMITS.drain_s + 1)
    assert kinds(orders) == ["Look", "Kill", "Close", "Open"]
    assert orders[1] == m.Kill("n0.w3", orders[1].reason) and "it has not left the closed epoch" in orders[1].reason


def test_a_survivor_and_the_only_holder_of_its_copy_that_are_late_to_leave_get_more_time_and_are_replaced_in_the_end():
    world = World(standbys=2).run()
    world.say(m.Observed("layout", {"copies": {"0": [1], "1": [0], "2": [3], "3": [2]}}))
    world.kill(2)
    for _ in range(MOST_RETRIES):
        world.release(2, 3)
        world.arrive()
        assert kinds(world.wait(LIMITS.drain_s + 1)) == ["Look", "Close", "Open"], "both copies would be lost"
    world.release(2, 3)
    assert [order.worker for order in world.wait(LIMITS.drain_s + 1) if isinstance(order, m.Kill)] == ["n0.w0", "n0.w1"]


def test_joiners_have_no_state_that_a_verdict_could_lose():
    world = World(standbys=3).run()
    world.say(m.Observed("layout", {"copies": {"0": [3], "1": [2], "2": [1], "3": [0]}}))
    world.exit(world.worker(1))
    world.exit(world.worker(2))
    world.release()
    late = world.wait(LIMITS.assemble_s + 1)
    assert [order.worker for order in late if isinstance(order, m.Kill)] == ["n0.w4", "n0.w5"]


def test_a_joiner_that_does_not_assemble_is_replaced():
    world = World(standbys=2).run()
    world.kill(2)
    world.release()
    orders = world.wait(LIMITS.assemble_s + 1)
    assert kinds(orders) == ["Look", "Kill", "Close", "Open"] and orders[1].worker == "n0.w4"


def test_one_worker_late_with_its_repair_is_replaced():
    world = World(standbys=2).run()
    world.kill(2)
    world.release()
    world.arrive()
    world.repair(0, 1, 2)
    orders = world.wait(LIMITS.repair_s + 1)
    assert kinds(orders) == ["Look", "Kill", "Close", "Open"] and orders[1].worker == "n0.w3"


def test_when_most_are_late_with_their_repair_who_hangs_shows_in_leaving():
    world = World(standbys=2).run()
    world.kill(2)
    world.release()
    world.arrive()
    orders = world.wait(LIMITS.repair_s + 1)
    assert kinds(orders) == ["Look", "Close", "Open"]
    world.release(0, 1, 2)
    orders = world.wait(LIMITS.drain_s + 1)
    assert kinds(orders)[0] == "Look" and orders[1] == m.Kill("n0.w3", orders[1].reason)


def test_reports_may_come_twice():
    world, twice = World().run(), World().run()

    def doubled(*reports, say=twice.say):
        return [order for report in reports for order in say(report) + say(report)]

    twice.say = doubled
    for one in (world, twice):
        one.kill(2)
        one.recover()
    assert kinds(world.orders) == kinds(twice.orders)
    assert twice.state.phase == RUNNING and twice.state.epoch == 1


def test_the_joiner_may_arrive_before_survivors_leave_and_after():
    for arrive_first in (True, False):
        world = World().run()
        world.kill(2)
        orders = world.arrive() + world.release() if arrive_first else world.release() + world.arrive()
        assert kinds(orders) == ["Repair"]


def test_releases_before_the_next_epoch_is_open_count():
    world = World(standbys=0).run()
    orders = world.kill(2)
    world.release()
    (name,) = world.start_spawned(orders)
    assert kinds(world.ready(name)) == ["Open"] and world.state.phase == OPENED
    assert kinds(world.arrive()) == ["Repair"]


def test_stale_reports_are_ignored_and_it_is_said_why():
    world = World().run()
    world.kill(2)
    world.recover()
    survivor = world.worker(0)
    for report in (
        m.WorkerFailed(survivor, 0, 5, ["RecoverableError"], "late"),
        m.WorkerSuspects(survivor, 0, "world", "late"),
        m.WorkerReleased(survivor, 0, 5),
        m.WorkerResumed(survivor, 0, 5),
        m.WorkerDone(survivor, 0, 5),
        m.WorkerArrived(survivor, 1),
        m.WorkerExited("n0.w2", "n0", -9, True),
        m.WorkerReady("n9.w9", "n9", "x:1"),
        m.AgentJoined("n0", 0, "host0", 4, 1),
    ):
        assert world.say(report) == []
        assert world.last.startswith("ignored: "), world.last
    assert world.state.phase == RUNNING


def test_a_broken_device_is_believed_even_after_the_epoch_is_over():
    world = World(standbys=2).run()
    world.kill(2)
    orders = world.fail(0, "AcceleratorError", message="uncorrectable ECC error", epoch=0)
    assert kinds(orders) == ["Kill", "Close", "Open"] and orders[2].joiners == [0, 2]


def test_injected_faults_are_remembered_across_epochs():
    world = World().run()
    world.say(m.Observed("fault_injected", {"node": "n0", "number": 3, "kind": "kill"}))
    assert opened(world.kill(2)).fired == [3]
    assert world.events("fault_injected") == [{"node": "n0", "number": 3, "kind": "kill"}]


def test_the_user_is_told_once_a_recovery_that_a_redone_step_differs():
    world = World().run()
    differs = {"rank": 2, "epoch": 1, "step": 5, "differences": ["other batches"]}
    (notice,) = world.say(m.Observed("step_differs", differs), m.Observed("step_differs", {**differs, "rank": 3}))
    assert "step 5 was done again" in notice.message and "on rank 2: other batches" in notice.message
    assert len(world.events("step_differs")) == 2
    assert kinds(world.say(m.Observed("step_differs", {**differs, "epoch": 2}))) == ["Notice"]
    assert world.say(m.Observed("step_differs", {"step": 5})) == []


def test_without_hot_swap_every_failure_restarts():
    world = World(hot_swap=False, standbys=0).run()
    assert kinds(world.kill(2)) == ["Restart"]
    assert "hot-swap is off" in world.reasons


WAITS = {"doing": "wait", "where": "pair0"}


def test_a_pause_of_the_control_plane_counts_for_no_limit():
    """It goes on before the agents do, one of which takes 3 s longer than the other: a job that was suspended."""
    world = World(nodes=2, standbys=1).run()
    world.beat(5, r0=WAITS | {"since_s": 0.1})
    world.now += 24.0
    assert world.say(m.ControlBack(0, "n0", paused_s=24.0)) == []
    assert world.wait(3.0, beats=["n1"]) == [] and world.wait(9.0) == []
    assert world.events("control_back") == [], "it is the same control plane"
    world.beat(5, r0=WAITS | {"since_s": 11.0}, r1={"since_s": 11.0})
    assert only(world.wait(0.3), m.Look), "a hang is a hang afterwards, too"


def test_nobody_is_judged_while_no_agent_is_heard():
    world = World(standbys=1).run()
    world.beat(5, all=WAITS | {"where": "world", "since_s": 0.1})
    assert world.wait(60.0, beats=False) == []
    assert world.wait(10.0) == []
    world.beat(5, all=WAITS | {"where": "world", "since_s": 16.0})
    assert only(world.wait(0.3), m.Look)


def test_a_worker_is_not_judged_while_its_agent_is_silent():
    """Its agent was stopped, and it may have gone on."""
    world = World(nodes=2, standbys=1).run()
    world.beat(5, r0=WAITS | {"since_s": 7.7}, r1={"since_s": 7.7})
    assert world.wait(3.0, beats=["n1"]) == []
    assert "nothing was heard of its agent" in only(world.wait(2.0, beats=["n1"]), m.Close).reason


def test_a_run_ends_when_the_workers_for_an_empty_seat_are_set_up_differently_again_and_again():
    world = World(standbys=0).run()
    world.say(m.Observed("settings", {"worker": world.worker(0), "settings": {"code of ft/megatron": "1"}}))
    orders = world.kill(2)
    for _ in range(3):
        assert kinds(orders)[-1] == "Spawn"
        (name,) = world.start_spawned(orders)
        orders = world.say(m.Observed("settings", {"worker": name, "settings": {"code of ft/megatron": "2"}}))
    assert kinds(orders) == ["Stop"] and world.state.phase == ENDED
    assert orders[0].code == USER_CODE and "it is not set up as the other workers are" in orders[0].message
    assert [event["action"] for event in world.events("fault_detected")[1:]] == ["replace", "replace", "stop"]


def test_a_standby_that_is_set_up_differently_ends_no_run_that_trains():
    world = World(standbys=1).run()
    world.say(m.Observed("settings", {"worker": world.worker(0), "settings": {"--lr": "0.1"}}))
    orders = world.exit("n0.w4")
    for _ in range(3):
        (name,) = world.start_spawned(orders)
        orders = world.say(m.Observed("settings", {"worker": name, "settings": {"--lr": "0.2"}}))
    assert world.state.phase == RUNNING and kinds(orders) == ["Kill"]
