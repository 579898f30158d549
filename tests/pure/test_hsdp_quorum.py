"""Who is in a step of FT-HSDP: the pure decision."""

import pytest
from quorum_world import World

from ft.base.errors import UserError
from ft.job.quorum import Limits, NoQuorum, Quorum, Report
from ft.job.quorum.decide import judge, missing
from ft.job.quorum.server import parse_options
from ft.job.quorum.state import QuorumOptions
from ft.job.quorum.values import committed_in, estimated
from ft.net.codec import BadMessage, from_json, to_json


def test_whom_a_quorum_waits_for_can_be_asked():
    world = World(3, min_replicas=2)
    assert missing(world.state, world.now) == {}, "nobody has asked"
    for replica in range(2):
        world.hello(replica)
        world.report(replica, 0, 0, step_s=0.1)
    assert missing(world.state, world.now) == {2: "is expected and the run begins with all"}
    quorum = World.start(world)
    world.commits(quorum, 0, 2)
    assert missing(world.state, world.now) == {1: "was in the last quorum and is slower"}
    world.leave(1)
    world.leave(2)
    assert missing(world.state, world.now) == {
        1: "is offline, and too few are here",
        2: "is offline, and too few are here",
    }


def fails(world, quorum, suspects):
    """All members have failed and say whom they could not reach; returns the quorum that comes of it."""
    for replica in quorum.members:
        decision = world.retries(quorum, replica, *suspects.get(replica, ()))
    return decision.quorum


@pytest.mark.parametrize(
    "suspects, left_out",
    [
        ({0: [1], 1: [0]}, {1}),  # two blame each other: the larger id goes
        ({1: [2], 2: [1]}, {2}),
        ({0: [1]}, set()),  # one against one
        ({0: [1], 2: [1]}, {1}),
        ({}, set()),
    ],
)
def test_who_is_left_out_of_four(suspects, left_out):
    world = World(4)
    again = fails(world, world.start(), suspects)
    assert again.members == (0, 1, 2, 3), "the first time is forgiven"
    assert set(range(4)) - set(fails(world, again, suspects).members) == left_out


def test_the_one_that_is_further_stays():
    returned = {0: Report(0, 0, 4, 3, (1,)), 1: Report(1, 0, 5, 9, (0,))}
    quorum = Quorum(9, 4, 3, (0, 1), (), {0: 0, 1: 0})
    assert set(judge(quorum, returned, failed=1, forgiven=1)) == {0}


def test_weak_evidence_suffices_in_the_end():
    world = World(4)
    quorum, suspects = world.start(), {0: [1]}
    for _ in range(5):
        assert quorum.members == (0, 1, 2, 3)
        quorum = fails(world, quorum, suspects)
    assert quorum.members == (0, 2, 3)


def test_a_ban_grows_with_each_repetition():
    world = World(2, forgiven=0)
    lengths = []
    quorum = world.start(step_s=0.0)
    for _ in range(4):
        for replica in (0, 1):
            world.retries(quorum, replica, 1 - replica, step_s=0.0)
        lengths.append(round(world.state.of(1).ban.length_s, 1))
        world.wait(lengths[-1] + 0.3)
        quorum = world.commits(world.given[0, 0], 0, step_s=0.0).quorum
        assert quorum.members == (0, 1)
    assert lengths == [10.0, 20.0, 40.0, 80.0]


# --- lives, servers --------------------------------------------------------------------------------------------------


def test_a_life_that_is_over_is_refused():
    world = World(2)
    world.start()
    world.hello(1, life=3)
    with pytest.raises(NoQuorum, match="life 0 of replica 1 is over"):
        world.hello(1, life=0)
    world.give_up(1, life=2)
    assert world.state.of(1).phase == "here", "a word about an earlier life comes late"
    assert world.events("replica_offline")[0]["replica"] == 1


def test_a_report_that_is_sent_twice_is_answered_once():
    world = World(2)
    quorum = world.start()
    world.commits(quorum, 0, 1)
    assert world.commits(quorum, 0, number=quorum.number).quorum is None
    assert world.state.pending() == {}


# --- bad input -------------------------------------------------------------------------------------------------------


def test_every_exact_state_of_a_step_goes_before_an_estimate_and_one_estimate_before_another():
    lineages = [77, estimated(77, 0, 3), estimated(estimated(77, 4, 3), 1, 3), estimated(77, 1, 4)]
    reports = [Report(0, 0, 5, lineage) for lineage in lineages]
    older = Report(1, 0, 4, 76)
    assert sorted([older, *reports], key=lambda report: report.state) == [older, *reversed(reports)]
    assert [committed_in(lineage) for lineage in lineages] == [77] * 4
    assert [from_json(Report, to_json(report)) for report in reports] == reports


def test_a_replica_with_an_estimate_is_behind_one_with_the_exact_state():
    world = World(2)
    quorum = world.commits(world.start(), 0, 1).quorum
    world.lose(1)
    world.hello(1, 1, last=quorum)
    world.report(1, 1, estimated(1, 1, 1), 1)
    world.report(0, 1, 1, number=quorum.number)
    found = world.given[0, 0]
    assert (found.healthy, found.behind, found.lineage) == ((0,), (1,), 1)


@pytest.mark.parametrize(
    "values",
    [
        None,
        [],
        {},
        {"replica": 0, "life": 0, "next_step": 1},
        {"replica": -1, "life": 0, "next_step": 1, "lineage": 0},
        {"replica": 0, "life": 0, "next_step": 1, "lineage": -1},
        {"replica": 0, "life": 0, "next_step": 0, "lineage": -2},
        {"replica": 0, "life": 0, "next_step": "1", "lineage": 0},
        {"replica": True, "life": 0, "next_step": 1, "lineage": 0},
        {"replica": 0, "life": 0, "next_step": 1, "lineage": 0, "suspects": "all"},
        {"replica": 0, "life": 0, "next_step": 1, "lineage": 0, "suspects": [None]},
        {"replica": 0, "life": 0, "next_step": 1, "lineage": 0, "step_s": float("nan")},
        {"replica": 0, "life": 0, "next_step": 1, "lineage": 0, "more": 1},
        {"replica": 0, "life": 0, "next_step": 1 << 70, "lineage": 0},
    ],
)
def test_what_is_no_report(values):
    with pytest.raises(BadMessage):
        from_json(Report, values)


@pytest.mark.parametrize(
    "text, words",
    [
        ("{", "cannot be read"),
        ("{}", "replicas"),
        ('{"replicas": 3, "min_replicas": 4}', "min_replicas is 4 of 3"),
        ('{"replicas": 3, "forgiven": -1}', "forgiven"),
        ('{"replicas": 3, "limits": {"silent_s": 20.0}}', "silent_s"),
        ('{"replicas": 3, "limits": {"wait_s": -1}}', "wait_s"),
        ('{"replicas": 3, "limits": {"patience": 1}}', "patience"),
    ],
)
def test_options_that_cannot_work(text, words):
    with pytest.raises(UserError, match=words):
        parse_options(text)


def test_the_limits_grow_with_the_steps():
    limits = Limits().check()
    assert limits.calibrated(20.0).member_s == limits.member_s + 60.0
    assert limits.calibrated(None).member_s == limits.start_s
    assert QuorumOptions(3).check().min_replicas == 1
