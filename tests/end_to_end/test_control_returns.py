"""A recovery that leads to the same committed step again and again ends the run, unless something new has struck."""

from dataclasses import replace

import pytest
from agent_jobs import ROOT, Job
from control_world import World, kinds, only

from ft.faults import verdict
from ft.job import messages as m
from ft.job.control import history
from ft.job.control.state import RecoveryInProgress, Return

STALL = verdict.of_stall("work", 12.0, 10.3)
START = """
import sys
from ft.cli import main
sys.exit(main())
"""
UNEVEN = f"""
import sys
sys.path.insert(0, {str(ROOT / "examples")!r})
import own_trainer, torch
import torch.distributed as dist

real = own_trainer.train_step

def train_step(model, optimizer, step):
    if step == 3 and dist.get_rank() == 0:
        dist.all_reduce(torch.zeros(1))  # nobody else calls it
    return real(model, optimizer, step)

own_trainer.train_step = train_step
own_trainer.main()
"""


def stall(world, rank=1, step=5):
    """``rank`` computes while its neighbour waits for it; returns the orders."""
    waits = {"doing": "wait", "where": "pair0", "since_s": 12.0}
    world.beat(step, **{f"r{rank ^ 1}": waits, f"r{rank}": {"since_s": 11.0}})
    return world.wait(0.3) + world.looked(((rank,), "busy"), waiting=(rank ^ 1,))


def stand_still(world, step=5):
    world.beat(step, all={"doing": "wait", "where": "world", "since_s": 16.0})
    return world.wait(0.3) + world.looked()


def recovery(*faults):
    return RecoveryInProgress(
        1.0, 0, "", verdicts=[found.reason for found in faults], in_vain=all(f.in_vain for f in faults)
    )


def test_who_was_waited_for_in_vain_and_who_was_struck():
    in_vain = [STALL, verdict.of_standstill("world", 16.0, 15.0), verdict.of_suspicion("world", "reset")]
    in_vain += [verdict.of_lateness("it is not repaired", 60.0), verdict.of_silence(1.2, "S")]
    assert all(found.in_vain for found in in_vain)
    assert all(verdict.raised(found, verdict.RESTART, "again").in_vain for found in in_vain)
    struck = [verdict.of_exit(-9), verdict.of_exit(1), verdict.of_lost_agent("n0", "gone")]
    struck += [verdict.of_silence(0.3, "T"), verdict.of_silence(1.2, "D"), verdict.of_error(["ValueError"], "no")]
    assert not any(found.in_vain for found in struck)


def test_returns_count_while_nothing_new_strikes():
    returns = history.returned([], 3, recovery(verdict.of_exit(-9)), fired=1)
    assert returns == [Return(3, ["killed by SIGKILL"], 1)]
    returns = history.returned(returns, 3, recovery(STALL), fired=1)
    assert len(returns) == 2 and history.going_round(returns) == ""
    assert len(history.returned(returns, 4, recovery(STALL), fired=1)) == 1, "a step was committed"
    assert len(history.returned(returns, 3, recovery(STALL), fired=2)) == 1, "a fault was injected"
    assert len(history.returned(returns, 3, recovery(STALL, verdict.of_exit(-9)), fired=1)) == 1, "a process has died"
    returns = history.returned(returns, 3, recovery(STALL), fired=1)
    said = history.going_round(returns)
    assert said.startswith("training has stopped 3 times after committed step 3")
    assert "  1. killed by SIGKILL\n  2. in work for 12.0 s" in said and "\n  3. in work for 12.0 s" in said


def test_the_third_stall_after_one_step_ends_the_run_and_says_who_waited_where():
    world = World(standbys=3).run()
    for culprit in (1, 3):  # each time another one: no rank alone shows that it goes round
        assert kinds(stall(world, culprit))[:4] == ["Look", "Kill", "Close", "Open"]
        world.recover()
    orders = stall(world, 1) + world.release() + world.arrive()
    stop = only(orders, m.Stop)
    assert stop.code == 1 and "stopped 3 times after committed step 5" in stop.message
    assert "n0.w1 (logical rank 1): in step 6 for" in stop.message
    assert "logical rank(s) 0 waited in pair0" in stop.message and "logical rank(s) 2 waited in pair0" in stop.message
    assert not [order for order in orders if isinstance(order, m.Repair | m.Restart)]


@pytest.mark.parametrize("between", ["a death", "a step", "an injected fault"])
def test_with_something_new_in_between_the_run_goes_on(between):
    world = World(standbys=3).run()
    step = 5
    for attempt in range(4):
        if attempt == 2 and between == "a step":
            step = 6
        if attempt == 2 and between == "an injected fault":
            world.say(m.Observed("fault_injected", {"number": 1, "kind": "drop"}))
        if attempt == 2 and between == "a death":
            world.kill(2)
        else:
            stand_still(world, step)
        assert not [order for order in world.recover(step) if isinstance(order, m.Stop)]
    assert world.state.phase == "running"


def test_a_stall_in_the_first_step_after_a_recovery_counts_too():
    """Nobody has begun the step everywhere: it is one interruption, and still a return each time."""
    world = World(standbys=3).run()
    stand_still(world)
    made = []
    for _ in range(2):
        made += world.release() + world.arrive() + world.repair()
        made += world.wait(world.state.limits().repair_s + 1)
    made += world.release() + world.arrive()
    assert "it has not begun its first step within" in only(made, m.Stop).message


def test_a_restart_begins_to_count_anew():
    world = World(standbys=3).run()
    stand_still(world)
    world.recover()
    assert len(world.state.returns) == 1
    world.fail(0, "ValueError")
    assert world.state.returns == []


def test_what_came_before_is_in_words():
    returns = [Return(3, ["a", "b"], 0)] * 3
    assert "  1. a; b\n" in history.going_round(returns)
    assert history.going_round([replace(one, step=4) for one in returns]).count("step 4") == 1


@pytest.mark.long
def test_an_operation_that_only_some_ranks_call_ends_the_run(tmp_path):
    (tmp_path / "uneven.py").write_text(UNEVEN)
    flags = ["--run-dir", "run", "--nproc-per-node", "2", "uneven.py", "--steps", "6"]
    job = Job(tmp_path, flags, ("-c", START))
    try:
        assert job.wait(180) == 1
        said = job.text()
        assert "training has stopped 3 times after committed step 3" in said, said
        assert "waited in" in said and "all workers wait" in said
    finally:
        job.close()
