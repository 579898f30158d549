"""How runs begin and end, by the control plane's decisions."""

import pytest
from control_world import LIMITS, World, kinds, only, opened

from ft.base.errors import ENDED_EARLY, NOT_SAVED
from ft.job import messages as m
from ft.job.control.state import ENDED, GATHERING, RUNNING


def test_a_start_waits_for_all_agents_and_all_workers():
    world = World(world_size=4, nodes=2)
    world.say(m.AgentJoined("n0", 0, "host0", 2, 1))
    world.start_worker("n0", 0)
    world.start_worker("n0", 1)
    assert world.ready("n0.w0") + world.ready("n0.w1") == []
    world.say(m.AgentJoined("n1", 1, "host1", 2, 1))
    for rank in (2, 3):
        world.start_worker("n1", rank)
    assert world.ready("n1.w1") == []
    order = opened(world.ready("n1.w0"))
    assert order.fresh and order.epoch == 0 and order.joiners == []
    assert [order.seats[rank].worker for rank in range(4)] == ["n0.w0", "n0.w1", "n1.w0", "n1.w1"]
    assert [order.seats[rank].local_rank for rank in range(4)] == [0, 1, 0, 1]


def test_standbys_are_started_once_training_has_begun():
    world = World(standbys=2).join()
    orders = world.start_workers()
    assert kinds(orders) == ["Open"]
    assert world.say(*(m.WorkerResumed(f"n0.w{rank}", 0, 0) for rank in range(4))) == [m.Spawn("n0", 2)]


def test_agents_that_do_not_come():
    world = World(world_size=4, nodes=2)
    world.say(m.AgentJoined("n0", 0, "host0", 2, 1))
    stop = only(world.wait(LIMITS.join_s + 1), m.Stop)
    assert stop.message.startswith("1 of 2 agents came within 600 s: n0")


def test_nodes_that_do_not_have_the_workers_that_were_announced():
    world = World(world_size=4, nodes=2)
    world.say(m.AgentJoined("n0", 0, "host0", 2, 1))
    stop = only(world.say(m.AgentJoined("n1", 1, "host1", 1, 1)), m.Stop)
    assert stop.code == 2 and "4 workers were announced, the nodes have 3 (n0: 2, n1: 1)" in stop.message


def test_workers_that_do_not_attach():
    world = World().join()
    world.start_workers(ready=False)
    world.ready("n0.w0")
    order = only(world.wait(LIMITS.join_s + 1), m.Restart)
    assert "logical rank(s) 1, 2, 3 were not ready within 600 s" in order.reason


def test_workers_that_nobody_starts():
    world = World().join()
    world.start_workers({"n0": [0, 2]}, ready=False)
    stop = only(world.wait(LIMITS.join_s + 1), m.Stop)
    assert stop.code == 1 and "logical rank(s) 1, 3 were not started within 600 s" in stop.message


def test_a_worker_that_dies_while_the_run_starts_leads_to_a_restart():
    world = World().join()
    world.start_workers()
    order = only(world.kill(3), m.Restart)
    assert "no state is in memory yet" in order.reason


def test_all_done_is_the_end():
    world = World().run()
    for rank in range(3):
        assert world.say(m.WorkerDone(world.worker(rank), 0, 12)) == []
    assert world.say(m.WorkerDone(world.worker(3), 0, 12)) == [m.Finish()]
    assert world.events("finished") == [{"step": 12}]
    assert world.state.phase == ENDED and world.exit("n0.w0", 0) == []


def test_a_death_after_others_are_done_is_recovered():
    world = World().run()
    for rank in range(3):
        world.say(m.WorkerDone(world.worker(rank), 0, 12))
    assert kinds(world.kill(3)) == ["Close", "Open"]
    world.recover()
    assert world.state.phase == RUNNING and not any(w.done for w in world.state.seated())
    assert world.say(*(m.WorkerDone(world.worker(rank), 1, 12) for rank in range(4))) == [m.Finish()]


def test_workers_that_end_with_0_are_done():
    world = World().run()
    orders = [order for rank in range(4) for order in world.kill(rank, code=0)]
    assert orders == [m.Finish()]


def test_a_worker_that_ends_with_0_while_others_go_on_is_lost():
    world = World().run()
    assert world.kill(1, code=0) == []
    orders = world.wait(LIMITS.leave_s + 2)
    assert kinds(orders) == ["Close", "Open"] and orders[1].joiners == [1]
    assert "ended with code 0 although the others go on" in world.reasons


def test_a_worker_that_ended_with_0_is_replaced_when_another_one_fails():
    world = World(standbys=2).run()
    world.kill(1, code=0)
    assert opened(world.kill(2)).joiners == [1, 2]


@pytest.mark.parametrize("attach_first", [True, False])
def test_a_user_error_stops_the_run_with_code_2(attach_first):
    world = World().join()
    world.start_workers(ready=attach_first)
    stop = only(world.exit("n0.w1", 2, attached=attach_first), m.Stop)
    assert stop.code == 2


def test_a_user_error_says_its_message():
    world = World().run()
    stop = only(world.fail(0, "UserError", message="no such file\n  fix: check the path"), m.Stop)
    assert stop == m.Stop(2, "n0.w0 (logical rank 0): no such file\n  fix: check the path")


def test_plain_scripts_that_all_end_with_0():
    world = World().join()
    world.start_workers(ready=False)
    orders = [order for rank in range(4) for order in world.exit(f"n0.w{rank}", 0, attached=False)]
    assert orders == [m.Finish()]


@pytest.mark.parametrize("code", [NOT_SAVED, ENDED_EARLY])
def test_plain_scripts_end_a_run_as_they_say(code):
    world = World().join()
    world.start_workers(ready=False)
    orders = [order for rank in range(4) for order in world.exit(f"n0.w{rank}", code, attached=False)]
    assert orders == [m.Finish(code)]


@pytest.mark.parametrize(
    ("says", "code"),
    [
        ({}, 0),
        ({"early": "SIGTERM", "steps": 300}, ENDED_EARLY),
        ({"unsaved": "disk full"}, NOT_SAVED),
        ({"early": "SIGTERM", "steps": 300, "unsaved": "disk full"}, NOT_SAVED),
    ],
)
def test_a_run_ends_as_one_of_its_workers_says(says, code):
    world = World().run()
    orders = []
    for rank in range(4):
        orders += world.say(m.WorkerDone(world.worker(rank), 0, 219, **(says if rank == 2 else {})))
    assert orders == [m.Finish(code)]
    (end,) = world.events("finished")
    assert end == {"step": 219, **says}


def test_a_checkpoint_that_is_the_last_one_and_cannot_be_saved_ends_the_run():
    world = World().run()
    stop = only(world.say(m.WorkerFailed(world.worker(1), 0, 12, ["LastSaveFailed"], "no space left")), m.Stop)
    assert stop == m.Stop(NOT_SAVED, "no space left")
    assert [end["unsaved"] for end in world.events("finished")] == ["no space left"]


@pytest.mark.parametrize("code, stopped_with", [(1, 1), (7, 7), (-9, 137), (-11, 139)])
def test_a_plain_script_that_fails_ends_the_job(code, stopped_with):
    world = World().join()
    world.start_workers(ready=False)
    world.exit("n0.w0", 0, attached=False)
    stop = only(world.exit("n0.w1", code, attached=False), m.Stop)
    assert stop.code == stopped_with and "logical rank 1" in stop.message


def test_a_plain_script_may_run_for_ever():
    world = World().join()
    world.start_workers(ready=False)
    assert world.wait(3 * LIMITS.join_s) == []


def test_a_signal_ends_the_run_with_its_code():
    world = World().run()
    stop = only(world.say(m.AgentLeaving("n0", 15)), m.Stop)
    assert stop == m.Stop(143, "the agent of n0 was told to end by SIGTERM")
    assert world.exit("n0.w0", -15) == []


def test_a_run_that_was_told_to_end_and_gets_nowhere_is_ended_with_a_sentence():
    world = World().run()
    world.beat(all={"since_s": 500.0})
    world.say(m.EndWanted("n0", 15))
    assert world.wait(LIMITS.exit_s) == [], "three steps of 0.1 s belong to the limit"
    notice, stop = world.wait(1.0)
    assert stop == m.Stop(143, "SIGTERM has told n0 to end the run, and it stands still")
    assert "no worker has gotten anywhere for 6" in notice.message and "last committed step is 5" in notice.message


def test_a_run_that_was_told_to_end_may_save_for_as_long_as_any_save_may_take():
    world = World().run()
    world.say(m.EndWanted("n0", 15))
    idle, saves = {"doing": "idle", "where": "done", "since_s": 200.0}, {"doing": "aside", "where": "save"}
    world.beat(all=idle, r1={**saves, "since_s": 200.0})
    assert "Stop" not in kinds(world.wait(LIMITS.exit_s + 10.0))
    world.beat(all=idle, r1={"since_s": 0.0})
    assert "Stop" not in kinds(world.wait(1.0)), "it has saved, and ends"
    world.beat(all=idle, r1={**saves, "since_s": LIMITS.start_s + 1.0})
    assert only(world.wait(1.0), m.Stop).code == 143


def test_a_run_that_is_told_to_end_in_a_recovery_recovers_first():
    world = World(standbys=2).run()
    world.kill(2)
    world.release()
    world.say(m.EndWanted("n0", 15))
    world.beat(all={"doing": "idle", "where": "recovery", "since_s": 500.0})
    assert world.wait(LIMITS.exit_s + 10.0) == [], "a worker may assemble itself for longer"
    orders = world.recover() + world.wait(1.0)
    assert "Resume" in kinds(orders) and "Stop" not in kinds(orders)


def test_a_run_that_was_not_told_to_end_is_not_ended_by_that_limit():
    world = World().run()
    world.beat(all={"since_s": 500.0})
    assert world.wait(LIMITS.exit_s + 10.0) == []


def test_a_signal_to_a_standby_nodes_agent_leaves_the_others_alone():
    world = World(world_size=4, nodes=2, standbys=0, standby_nodes=1).run()
    assert not {"Stop", "Close"} & {type(order).__name__ for order in world.say(m.AgentLeaving("n2", 15))}
    assert world.state.agents["n2"].gone and not world.state.standbys()
    world.kill(0)
    assert world.state.phase != ENDED


def test_a_signal_after_the_work_is_done_is_a_good_end():
    world = World(world_size=4, nodes=2).run()
    for rank in range(3):
        world.kill(rank, code=0)
    world.say(m.WorkerDone(world.worker(3), 0, 9))
    assert world.orders[-1] == m.Finish()


def test_a_signal_while_the_workers_are_done_but_one():
    world = World().run()
    for rank in range(3):
        world.kill(rank, code=0)
    assert only(world.say(m.AgentLeaving("n0", 15)), m.Stop).code == 143


def test_no_restart_is_possible_when_nodes_are_lacking():
    world = World(world_size=4, nodes=2, standbys=1).run()
    orders = world.wait(LIMITS.agent_lost_s + 1, beats=["n0"])
    assert kinds(orders)[-2:] == ["Close", "Spawn"] and orders[-1] == m.Spawn("n0", 1)
    for name in world.start_spawned(orders):
        world.ready(name)
    world.release()
    stop = only(world.arrive(), m.Stop)
    assert "the nodes that are left cannot hold 4 workers" in stop.message


def test_restarts_count_and_epochs_go_on():
    world = World().run()
    world.kill(0)
    world.recover()
    world.fail(0, "ValueError")
    orders = world.start_workers()
    assert opened(orders).epoch == 2 and opened(orders).fresh
    assert world.state.restarts == 1 and world.state.phase != GATHERING


def test_a_run_whose_planned_faults_could_never_act_ends_with_2():
    world = World(faults=2).join()
    world.start_workers(ready=False)
    orders = [order for rank in range(4) for order in world.exit(f"n0.w{rank}", 0, attached=False)]
    stop = only(orders, m.Stop)
    assert stop.code == 2 and "none of the 2 planned fault(s) could act" in stop.message and "fix:" in stop.message


def test_a_run_that_has_trained_under_a_guard_finishes_whatever_of_its_faults_happened():
    world = World(faults=2, standbys=0).join()
    world.begin(world.start_workers())
    assert world.state.protected
    orders = world.say(*(m.WorkerDone(f"n0.w{rank}", 0, 9) for rank in range(4)))
    assert kinds(orders) == ["Finish"]
