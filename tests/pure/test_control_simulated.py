"""Histories that the simulation has found, by hand: each had the run hang, end or begin anew without need."""

from control_world import LIMITS, World, kinds, only

from ft.job import messages as m
from ft.job.control.state import GATHERING, RUNNING


def test_a_worker_that_never_takes_its_seat_in_a_fresh_epoch_does_not_hold_up_the_start_for_ever():
    world = World(standbys=0).join()
    opened = only(world.start_workers(), m.Open)
    for rank in (0, 1, 2):
        world.say(m.WorkerResumed(world.worker(rank), opened.epoch, 0))
    waits, absent = {"doing": "wait", "step_s": None}, {"doing": "idle", "step_s": None, "epoch": -1}
    world.beat(step=0, r0=waits, r1=waits, r2=waits, r3=absent)
    assert world.wait(LIMITS.start_s - 1.0) == []
    restart = only(world.wait(5.0), m.Restart)
    assert "it has not taken its seat within 300 s" in restart.reason and "logical rank 3" in restart.reason


def test_the_last_worker_hangs_when_all_others_are_done():
    world = World().run()
    for rank in (0, 1, 2):
        world.say(m.WorkerDone(world.worker(rank), 0, 5))
    done = {"doing": "idle", "where": "done"}
    world.beat(r0=done, r1=done, r2=done, r3={"doing": "compute", "since_s": LIMITS.stall_s + 1.0})
    orders = world.wait(1.0) + world.looked(((3,), "busy"), waiting=(0, 1, 2))
    assert kinds(orders)[:4] == ["Look", "Kill", "Close", "Open"] and orders[1].worker == "n0.w3"


def test_the_last_worker_may_save_for_long_when_all_others_are_done():
    world = World().run()
    for rank in (0, 1, 2):
        world.say(m.WorkerDone(world.worker(rank), 0, 5))
    done = {"doing": "idle", "where": "done"}
    world.beat(r0=done, r1=done, r2=done, r3={"doing": "aside", "since_s": LIMITS.start_s - 5.0})
    assert world.wait(1.0) == []
    assert world.state.phase == RUNNING


def test_a_standby_node_that_was_to_start_workers_is_lost_before_it_has():
    world = World(world_size=4, nodes=2, standbys=0, standby_nodes=2, max_restarts=3).run()
    world.say(m.AgentLeaving("n1", 0))
    first = only(world.fail(0, "ValueError"), m.Restart)
    assert first.ranks == {"n0": [0, 1], "n2": [2, 3]}
    world.start_workers({"n0": [0, 1]})
    again = only(world.say(m.AgentLeaving("n2", 0)), m.Restart)
    assert again.ranks == {"n0": [0, 1], "n3": [2, 3]}
    assert "node n2 was lost before its workers had started" in again.reason


def test_a_node_without_workers_of_this_start_may_be_lost_meanwhile():
    world = World(world_size=4, nodes=2, standbys=0, standby_nodes=2, max_restarts=3).run()
    world.fail(0, "ValueError")
    world.start_workers({"n0": [0, 1]})
    assert kinds(world.say(m.AgentLeaving("n3", 0))) in ([], ["GivenUp"])
    assert world.state.phase == GATHERING


def test_a_dead_worker_does_not_come_to_life_by_a_report_that_comes_twice():
    world = World().run()
    started = m.WorkerStarted("n0.w2", "n0", 1002, 2)
    world.kill(2)
    before = set(world.state.workers)
    assert world.say(started) == [] and set(world.state.workers) == before
    assert world.last == "ignored: n0.w2 is known, or its node is not"


def test_the_layout_of_a_worker_of_an_earlier_life_is_no_news():
    world = World().run()
    world.fail(0, "ValueError")
    late = {"worker": "n0.w0", "dp_peers": {"0": [0]}, "shards": {"0": ["optimizer of an earlier life"]}}
    world.say(m.Observed("layout", late))
    assert world.last == "ignored: the layout of n0.w0, which is unknown or gone"
    assert world.state.shards == {}


def test_an_agent_that_comes_back_at_once_is_the_same_node():
    world = World(world_size=4, nodes=2)
    world.say(m.AgentJoined("n1", 1, "host1", 2, 1), m.AgentJoined("n1-2", 1, "host1", 0, 2))
    assert "the agent of n1-2 is there, 1 of 2" in world.reasons
    world.say(m.AgentJoined("n0", 0, "host0", 2, 1))
    assert world.state.phase == GATHERING and "2 of 2" in world.reasons


def test_a_node_that_comes_back_while_training_runs_is_welcome():
    world = World(world_size=4, nodes=2).run()
    world.say(m.AgentLeaving("n1", 0))
    assert "Stop" not in kinds(world.say(m.AgentJoined("n1-2", 1, "host1", 0, 2)))


def test_a_worker_that_was_started_for_an_earlier_restart_is_nobody():
    world = World(max_restarts=3).run()
    world.fail(0, "ValueError")
    late = m.WorkerStarted("n0.w9", "n0", 1009, 0, restart=0)
    assert world.say(late) == [] and "n0.w9" not in world.state.workers
    assert world.last == "ignored: n0.w9 was started for restart 0, the last one is 1"
    world.say(m.WorkerStarted("n0.w10", "n0", 1010, 0, restart=1))
    assert "n0.w10" in world.state.workers


def test_what_a_joiner_said_in_an_earlier_epoch_does_not_replace_what_it_says_now():
    world = World(standbys=2).run()
    world.kill(2)
    world.arrive()
    joiner, before = world.worker(2), world.holder(2).arrived
    world.kill(1)
    world.release()
    world.say(m.WorkerArrived(joiner, 1, []))
    assert world.last.startswith(f"ignored: {joiner} has arrived in epoch 1") and world.holder(2).arrived == before


def test_ranks_that_are_lost_together_for_the_third_time_are_one_failure():
    world = World(world_size=4, nodes=2, standbys=0, standby_nodes=2, max_restarts=3).run()
    for lost in ("n2", "n3"):
        names = world.start_spawned([m.Spawn(lost, 2)])
        for name in names:
            world.ready(name)
    world.say(m.AgentLeaving("n1", 0))
    world.say(m.AgentLeaving("n2", 0))
    orders = world.say(m.AgentLeaving("n3", 0))
    assert "2 replacements failed alike at step 5" in world.reasons
    assert "Stop" not in kinds(orders) or "the same error as before" not in orders[-1].message
