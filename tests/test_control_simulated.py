"""Histories that the simulation has found, by hand: each had the run hang, end or begin anew without need."""

from control_world import LIMITS, World, kinds, only

from ft import messages as m
from ft.control.state import GATHERING, RUNNING


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
    orders = world.wait(1.0)
    assert kinds(orders)[:3] == ["Kill", "Close", "Open"] and orders[0].worker == "n0.w3"


def test_the_last_worker_may_save_for_long_when_all_others_are_done():
    world = World().run()
    for rank in (0, 1, 2):
        world.say(m.WorkerDone(world.worker(rank), 0, 5))
    done = {"doing": "idle", "where": "done"}
    world.beat(r0=done, r1=done, r2=done, r3={"doing": "aside", "since_s": LIMITS.start_s - 5.0})
    assert world.wait(1.0) == []
    assert world.state.phase == RUNNING
