"""Stragglers: who is named among ranks with the same work, how soon, and how often somebody is named in vain."""

import random

import pytest

from ft.base.step_clock import BLOCK
from ft.job.control.stragglers import WINDOW, compare, is_punctual

JITTER = 0.02


def simulated(seed: int, ranks: int, steps: int, slow: dict[int, float], since: int = 0, jitter: float = JITTER):
    """Return rank -> seconds of own work in each step: 0.1 s with normal jitter; ``slow``: rank -> factor."""
    draw = random.Random(seed)
    return {
        rank: [
            0.1 * (slow.get(rank, 1.0) if step >= since else 1.0) * max(0.1, draw.gauss(1.0, jitter))
            for step in range(steps)
        ]
        for rank in range(ranks)
    }


def late(times) -> list[int]:
    return [rank for rank, pace in compare(times).items() if pace.is_late]


def named_after(times, since: int) -> tuple[int | None, set[int]]:
    """Return (steps from ``since`` until somebody is named, who), if reports come after every ``BLOCK`` steps."""
    steps = len(next(iter(times.values())))
    for end in range(BLOCK, steps + 1, BLOCK):
        if found := late({rank: own[:end] for rank, own in times.items()}):
            return end - since, set(found)
    return None, set()


@pytest.mark.parametrize("ranks", [2, 3, 4, 16])
def test_equal_ranks_are_never_named(ranks):
    """4 x 2500 runs of 40 to 80 steps with 2 % jitter, each judged up to five times: nobody is named in any of them."""
    named = sum(
        named_after(simulated(seed, ranks, WINDOW + 4 * BLOCK * (seed % 25 == 0), {}), 0)[0] is not None
        for seed in range(2500)
    )
    assert named == 0


@pytest.mark.parametrize("ranks", [2, 4, 16])
def test_a_rank_that_is_five_per_cent_slower_is_named_within_fifty_steps(ranks):
    found = []
    for seed in range(300):
        since = 60 + seed % BLOCK
        after, who = named_after(simulated(seed, ranks, since + 60, {1: 1.05}, since), since)
        found.append(after is not None and after <= 50 and who == {1})
    assert sum(found) >= 0.99 * len(found)


def test_who_is_slow_for_a_moment_is_not_named():
    times = simulated(1, 4, 100, {})
    times[2][70:82] = [0.3] * 12  # such as a save on a slow disk
    times[3][::10] = [0.2] * 10  # such as a garbage collection in every tenth step
    assert all(not late({rank: own[:end] for rank, own in times.items()}) for end in range(40, 101))


def test_large_noise_needs_a_large_difference():
    assert sum(bool(late(simulated(seed, 4, 40, {}, jitter=0.3))) for seed in range(500)) == 0
    assert all(late(simulated(seed, 4, 40, {2: 2.0}, jitter=0.15)) == [2] for seed in range(50))


def test_several_stragglers_are_named_as_long_as_most_ranks_are_none():
    assert late(simulated(3, 8, 40, {0: 1.2, 5: 1.1, 7: 1.5})) == [0, 5, 7]


def test_the_pace_says_how_slow_a_rank_is():
    pace = compare(simulated(4, 4, 60, {1: 1.2}))[1]
    assert pace.ratio == pytest.approx(1.2, abs=0.02)
    assert pace.own_s == pytest.approx(0.12, rel=0.02) and pace.usual_s == pytest.approx(0.1, rel=0.02)
    assert not is_punctual(pace) and is_punctual(compare(simulated(4, 4, 60, {}))[1])


def test_nothing_is_said_of_a_rank_alone_or_of_few_steps():
    assert compare(simulated(1, 1, 100, {0: 2.0})) == {}
    assert compare(simulated(1, 4, WINDOW - 1, {0: 2.0})) == {}
