"""The recovery ladder: on random situations no state that is not verified, no level skipped that would have lost less,
no wait without a limit. Every level in its turn: ``conversations/ladder``."""

import copy
import os
import random
from collections import Counter

import ladder_situations
import pytest
from control_world import LIMITS, World
from lines_run import lines_run

from ft import cli
from ft.job import messages as m
from ft.job.control import recovery
from ft.job.control.recovery import CHECKPOINT, MIDDLE, HostMemory, Stages, decide, plan_from_memory
from ft.job.control.state import GridPosition
from ft.job.parts import Holdings

SITUATIONS = 20_000


def test_the_table_of_the_command_has_the_levels_in_their_order_and_fits_a_terminal(capsys):
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
        seen[found.level] += 1
        assert not (said := ladder_situations.broken(situation, found)), f"FT_TESTS_SEED={number}: {said}"
    assert set(seen) == set(recovery.LADDER), "a level was never taken"


def within(world, *names: str) -> bool:
    """Return whether the control plane acts within the limits if nobody answers it, apart from the agents' beats."""
    orders = copy.deepcopy(world).wait(1 + sum(getattr(LIMITS, name.removeprefix("control.")) for name in names))
    return any(isinstance(order, m.Kill | m.Close | m.Restart | m.Stop) for order in orders)


def test_the_control_plane_waits_for_no_answer_longer_than_the_level_says():
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


def plan_of_large_job(pp: int, dp: int, tp: int = 4):
    """Return the plan of a job that has lost a quarter of its ranks, and with them all data of a part of each stage."""
    ranks, stage = range(pp * dp * tp), dp * tp
    places = {rank: GridPosition(rank // stage, rank % tp, rank // tp % dp, 0, 2) for rank in ranks}
    before = {rank: rank - tp if rank % stage >= tp else rank + stage - tp for rank in ranks}
    held = {rank: Holdings([7, 6], {before[rank]: [7, 6]}) for rank in ranks if rank % tp}
    peers = {rank: list(range(rank // stage * stage + rank % tp, (rank // stage + 1) * stage, tp)) for rank in ranks}
    return plan_from_memory(HostMemory(list(ranks), held, peers), Stages(MIDDLE, places))


def test_the_decision_grows_in_proportion_to_the_ranks():
    assert plan_of_large_job(16, 8).name == CHECKPOINT
    small, large = (lines_run(lambda size=size: plan_of_large_job(*size)) for size in ((8, 8), (16, 32)))
    assert large < 1.25 * 8 * small, f"{large / small:.1f} times the lines for 8 times the ranks"


@pytest.mark.parametrize("planted", ladder_situations.PLANTED)
def test_a_planted_bug_is_found(planted):
    with ladder_situations.PLANTED[planted]:
        assert any(ladder_situations.broken(ladder_situations.situation(number)) for number in range(2000))
