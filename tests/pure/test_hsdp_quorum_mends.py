"""A replica that replaces a lost worker in place: the quorum waits for it, and not for ever."""

import pytest
from quorum_world import World

from ft.job.quorum import Limits


def _at_work():
    world = World(3)
    return world, world.start()


@pytest.mark.parametrize("leader_is_lost", [False, True])
def test_the_others_wait_for_a_replica_that_replaces_a_worker_and_do_the_step_with_it(leader_is_lost):
    world, first = _at_work()
    if leader_is_lost:
        world.lose(1)
    world.mends(1)
    for replica in (0, 2):
        world.retries(first, replica, 1)
    waiting = world.wait(5.0)
    assert waiting.quorum is None and "replica 1 is replacing a lost worker" in waiting.reason
    world.hello(1, life=1)
    assert world.wait(1.0).quorum is None, "it is connected, and about to report"
    quorum = world.report(1, 0, 0, life=1).quorum
    assert (quorum.step, quorum.healthy, quorum.behind) == (0, (0, 1, 2), ())
    assert dict(quorum.lives) == {0: 0, 1: 1, 2: 0}


def test_one_whose_copies_are_a_step_older_is_behind():
    world, first = _at_work()
    world.mends(1)
    for replica in (0, 2):
        world.commits(first, replica)
    world.hello(1, life=1)
    quorum = world.report(1, 0, 0, life=1).quorum
    assert (quorum.step, quorum.healthy, quorum.behind) == (1, (0, 2), (1,))


def test_nobody_waits_longer_than_the_limit_or_after_the_notice_has_ended():
    for ends in (True, False):
        world, first = _at_work()
        world.lose(1)
        world.mends(1)
        for replica in (0, 2):
            world.retries(first, replica, 1)
        if ends:
            world.mended(1)
            assert world.wait(1.0).quorum.healthy == (0, 2)
        else:
            assert world.wait(Limits().mend_s - 1.0).quorum is None
            assert world.wait(2.0).quorum.healthy == (0, 2)


def test_a_notice_of_an_earlier_life_makes_nobody_wait():
    world, first = _at_work()
    world.hello(1, life=1)
    world.mends(1, life=0)
    for replica in (0, 2):
        decision = world.retries(first, replica)
    assert decision.quorum is not None or "replacing" not in decision.reason


@pytest.mark.parametrize("steps", [0, 3])
def test_a_replica_that_says_that_its_state_is_further_is_waited_for(steps):
    world, _ = _at_work()
    world.lose(1)
    world.lose(2)
    world.wait(20.0)
    world.hello(1, life=1, steps=steps)
    world.hello(2, life=1)
    world.lose(0)
    decision = world.report(2, 1, 1, life=1)
    assert ("replica 1 is further than all others, and lives" in decision.reason) == (steps > 1)
