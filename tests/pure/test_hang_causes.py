"""The cause of a hang by the structure of who waits for whom: over time, in injected faults, and in large runs.

One small case for each kind of cause is in ``conversations/hang``.
"""

from dataclasses import replace

import pytest
from large_inspections import FAULTS, large_inspection
from lines_run import lines_run

from ft.faults.hang.causes import diagnose, over_time
from ft.faults.hang.graph import Graph
from ft.faults.hang.inspection import (
    Inspection,
    Operation,
    Rank,
)
from tests.simulation.hangs.machine import Layout
from tests.simulation.hangs.run import case, count

GROUPS = {"tp": (0, 1), "dp": (0, 2), "all": (0, 1, 2)}


def op(group, sequence=1, name="all_reduce", **more):
    return Operation(group, name, sequence, **more)


def rank(number, *pending, counts=None, **more):
    """A rank that waits in the operations ``pending``."""
    counted = {one.channel: one.sequence for one in pending} | (counts or {})
    return Rank(number, f"n0.w{number}", "n0", counts=counted, operations=tuple(pending), **more)


def test_everybody_is_there_so_a_connection_is_slow():
    (cause,) = diagnose(Inspection({number: rank(number, op("tp")) for number in (0, 1)}, GROUPS)).causes
    assert cause.kind == "slow-link" and cause.ends == (0, 1)


@pytest.mark.parametrize(
    ("round_trips", "named", "alike"),
    [
        ((0.2, 0.0002), 0, False),
        ((0.0002, 0.2), 1, False),
        ((0.0002, 0.0004), 0, True),
        ((None, 0.2), 0, True),
        ((None, None), 0, True),
    ],
)
def test_of_ranks_that_take_part_alike_in_slow_operations_the_round_trips_tell_which_it_is(round_trips, named, alike):
    def moment(number):
        ranks = [rank(n, op("tp", number), round_trip_s=round_trips[n]) for n in (0, 1)]
        return Inspection({one.rank: one for one in ranks}, {"tp": (0, 1)})

    (cause,) = over_time([moment(number) for number in range(1, 9)]).causes
    assert (cause.rank, cause.kind) == (named, "slow-link")
    assert cause.evidence[-1].endswith("any of them may be slow.") == alike
    assert alike or "Packets to and from the host of rank" in cause.evidence[-1]


def test_an_operation_in_the_background_is_no_wait():
    sent = op("pp", name="send", peer=1, awaited=False)
    assert Graph(Inspection({0: rank(0, sent), 1: rank(1)}, {"pp": (0, 1)})).waits == []


def test_a_slow_rank_is_told_from_those_that_happen_to_compute():
    def moment(number, culprit):
        waiting = [n for n in range(3) if n != culprit]
        there = [rank(n, op("all", number), step=number) for n in waiting]
        return Inspection(
            {one.rank: one for one in (*there, rank(culprit, counts={"all": number - 1}, step=number))}, GROUPS
        )

    slow = over_time([moment(n, 2 if n % 4 else 1) for n in range(1, 13)])
    assert [(cause.rank, cause.kind) for cause in slow.causes] == [(2, "slow-rank")]
    assert over_time([moment(n, n % 3) for n in range(1, 13)]).causes == ()


def test_injected_hangs_and_slow_downs_are_named(seed):
    cases = [one for one in map(case, range(seed, seed + 150)) if one is not None and one.fault != "slow link"]
    tally = count(cases)["all"]
    assert tally.cases > 60 and len(tally.misses) <= 0.03 * tally.cases, tally.misses


# --- large runs -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize(
    "layout", [Layout(tp=4, pp=4, dp=2, vpp=2), Layout(tp=2, cp=2, pp=2, dp=4, ep=2), Layout(dp=32)], ids=str
)
def test_the_search_grows_in_proportion_to_the_ranks(layout, fault):
    found = [large_inspection(replace(layout, dp=layout.dp * factor), fault) for factor in (2, 8)]
    small, large = (lines_run(lambda inspection=inspection: over_time([inspection])) for inspection in found)
    assert large < 1.25 * 4 * small, f"{large / small:.1f} times the lines for 4 times the ranks"


@pytest.mark.parametrize("fault, kind", [("busy", "busy"), ("node", "dead"), ("mismatch", "mismatch")])
def test_one_rank_in_the_middle_of_a_large_run_is_named_and_all_others_wait_for_it(fault, kind):
    inspection = large_inspection(Layout(tp=4, cp=2, pp=4, dp=16, ep=4, vpp=2), fault)
    first, *others = over_time([inspection]).causes
    assert (first.rank // 8, first.kind, others) == (256 // 8, kind, [])
    assert len(first.delayed) + len(first.guilty) == 512
