"""The recovery ladder: every rung in its turn, and on random situations no state that is not verified, no rung skipped
that would have lost less, no wait without a limit."""

import copy
import os
import random
from collections import Counter
from dataclasses import replace

import ladder_situations
import pytest
from control_world import LIMITS, World

from ft.job import messages as m
from ft.job.control import recovery
from ft.job.control.recovery import MIDDLE, HostMemory, Others, Restarts, Seats, Situation, Stages, decide
from ft.job.control.state import GridPosition
from ft.job.parts import Holdings, Neighbours, Source

SITUATIONS = 20_000


def job(lost=(), steps=(7, 6), copies=True, **more) -> Situation:
    """Return a pipeline of four stages, each a rank whose copy is at the next rank, after the loss of some."""
    ranks = range(4)
    holdings = {
        rank: Holdings(list(steps), {(rank - 1) % 4: list(steps)} if copies else {})
        for rank in ranks
        if rank not in lost
    }
    stages = Stages(more.pop("checkfree", ""), {rank: GridPosition(rank, 0, 0, 0, 2) for rank in ranks})
    more = {"seats": Seats(lost, len(lost)), "restarts": Restarts(checkpoints=[2]), **more}
    return Situation(7, HostMemory(ranks, holdings, {rank: [rank] for rank in ranks}), stages, **more)


FEW, NO_RESTART = Seats((1,), 0, 0), Restarts(0, 0, 4, checkpoints=[2])
CASES = [
    (recovery.IN_PLACE, job(), 0),
    (recovery.STANDBY, job([1]), 0),
    (recovery.COPY, job([1], seats=Seats((1,), 0, 1)), 0),
    (recovery.COPY, job(unverified={(1, 1, 7)}), 0),
    (recovery.STANDBY, job([1], unverified={(2, 1, 7)}), 1),
    (recovery.CHECKFREE, job([1], copies=False, checkfree=MIDDLE), 0),
    (recovery.CHECKPOINT, job([1], copies=False), 5),
    (recovery.CHECKPOINT, job([1], hot_swap=False), 5),
    (recovery.CHECKPOINT, job(barred="an error"), 5),
    (recovery.END, job(barred="an error", restarts=NO_RESTART), 5),
    (recovery.END, job([1], seats=FEW, restarts=replace(NO_RESTART, allowed=3, has_room=False)), 5),
]


@pytest.mark.parametrize(("rung", "situation", "steps"), CASES)
def test_a_situation_leads_to_its_rung(rung, situation, steps):
    found = decide(situation)
    assert (found.rung, found.lost.steps) == (rung, steps), found
    assert not ladder_situations.broken(situation)


REPLICAS, SPARE = Others(3), Others(3, reorders=True)


@pytest.mark.parametrize(
    ("rung", "situation", "position_of"),
    [
        (recovery.STANDBY, job([1], others=REPLICAS), None),
        (recovery.REPLICA, job([1, 2], others=REPLICAS), 0),
        (recovery.REPLICA, job([0, 1], others=SPARE), 2),
        (recovery.REPLICA, job([1, 2, 3], others=REPLICAS, unverified={(0, 0, 7)}), 0),
        (recovery.CHECKFREE, job([1], copies=False, checkfree=MIDDLE, others=REPLICAS), None),
        (recovery.REPLICA, job([1, 2], copies=False, checkfree=MIDDLE, others=REPLICAS), 0),
        (recovery.REPLICA, job([0, 1, 2, 3], others=REPLICAS), None),
        (recovery.REPLICA, job([1, 2], seats=FEW, others=REPLICAS), None),
        (recovery.REORDER, job([1], seats=FEW, others=SPARE), None),
        (recovery.REPLICA, job(barred="an error", others=REPLICAS), None),
        (recovery.REPLICA, job(barred="an error", others=REPLICAS, restarts=NO_RESTART), None),
    ],
)
def test_a_replica_that_does_not_know_the_others_keeps_its_workers_and_fetches_the_state(rung, situation, position_of):
    """``position_of``: the rank whose position all take; without one, the state is here, or all workers start anew."""
    found = decide(situation)
    assert found.rung == rung and (found.plan.position_of if found.plan is not None else None) == position_of, found
    assert found.reason and found.waits
    assert found.lost.ended == (situation.restarts == NO_RESTART) and not ladder_situations.broken(situation)


def test_a_decision_names_sources_and_what_spoke_against_the_rungs_before():
    assert decide(job([1])).plan.sources[1] == Source(2, 2)
    found = decide(job([1, 2], others=REPLICAS))
    assert found.refused[recovery.IN_PLACE] == "logical rank(s) 1, 2 have lost their worker"
    assert found.refused[recovery.STANDBY] == "of step 7, nobody has all that logical rank(s) 1 need"
    assert decide(job([1], copies=False, checkfree=MIDDLE)).plan.rebuilt == {1: Neighbours(0, 2)}


def test_the_end_says_what_the_last_resort_was_and_why_it_fails():
    found = decide(job(barred="an error", restarts=NO_RESTART))
    assert found.reason == "an error\n  The run ends: 0 warm restart(s) are allowed and used up"
    found = decide(job(barred="an error", restarts=NO_RESTART, others=REPLICAS))
    assert found.reason == "an error\n  This replica ends: 0 warm restart(s) are allowed and used up"


def test_the_decision_on_no_random_situation_breaks_a_property():
    first = int(os.environ.get("FT_TESTS_SEED", random.randrange(10**9)))
    print(f"FT_TESTS_SEED={first}")
    seen = Counter()
    for number in range(first, first + SITUATIONS):
        situation = ladder_situations.situation(number)
        found = decide(situation)
        seen[found.rung] += 1
        assert not (said := ladder_situations.broken(situation, found)), f"FT_TESTS_SEED={number}: {said}"
    assert set(seen) == set(recovery.LADDER), "a rung was never taken"


def within(world, *names: str) -> bool:
    """Return whether the control plane acts within the limits if nobody answers it, apart from the agents' beats."""
    orders = copy.deepcopy(world).wait(1 + sum(getattr(LIMITS, name.removeprefix("control.")) for name in names))
    return any(isinstance(order, m.Kill | m.Close | m.Restart | m.Stop) for order in orders)


def test_the_control_plane_waits_for_no_answer_longer_than_the_rung_says():
    world = World(standbys=1).run()
    world.kill(1)
    answers = (world.release, world.arrive, world.repair, world.resume)
    for name, answer in zip(recovery.waits(recovery.STANDBY), answers, strict=True):
        assert within(world, name), name
        answer()
    assert world.state.phase == "running"
    world = World(standbys=0).run()
    world.kill(1)
    assert within(world, "control.ready_s", "control.drain_s") and "control.ready_s" in recovery.waits(recovery.COPY)
    world = World(standbys=0).run()
    world.fail(1, "RuntimeError")
    assert world.state.restarts == 1 and within(world, *recovery.WARM_RESTART)


def test_the_control_plane_names_the_rung_of_a_repair():
    world = World(standbys=1).run()
    world.fail(0, "RecoverableError")
    world.recover()
    world.kill(1)
    world.recover()
    world.exit(world.state.standbys()[0].name)
    world.kill(2)
    spawned = [order for order in world.orders if isinstance(order, m.Spawn)][-1]
    for name in world.start_spawned([spawned]):
        world.ready(name)
    world.recover()
    assert [note["rung"] for note in world.events("repair_ordered")] == ["in place", "standby", "copy elsewhere"]


@pytest.mark.parametrize("planted", ladder_situations.PLANTED)
def test_a_planted_bug_is_found(planted):
    with ladder_situations.PLANTED[planted]:
        assert any(ladder_situations.broken(ladder_situations.situation(number)) for number in range(2000))
