"""The recovery ladder: on random situations no state that is not verified, no rung skipped that would have lost less,
no wait without a limit. Every rung in its turn: ``conversations/ladder``."""

import copy
import os
import random
from collections import Counter

import ladder_situations
import pytest
from control_world import LIMITS, World

from ft import cli
from ft.job import messages as m
from ft.job.control import recovery
from ft.job.control.recovery import decide

SITUATIONS = 20_000


def test_the_table_of_the_command_has_the_rungs_in_their_order_and_fits_a_terminal(capsys):
    assert cli.main(["plan", "policy"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert tuple(line.split("  ")[1].strip() for line in lines if line[:1].isdigit()) == recovery.LADDER
    assert max(map(len, lines)) <= 160


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
