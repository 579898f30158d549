"""Who is in a step of FT-HSDP: the pure decision."""

import pytest
from quorum_world import World

from ft.base.errors import UserError
from ft.job.quorum import Limits, NoQuorum, Quorum, Report
from ft.job.quorum.decide import judge, missing
from ft.job.quorum.server import parse_options
from ft.job.quorum.state import SPAN, Options
from ft.job.quorum.values import committed_in, estimated
from ft.net.codec import BadMessage, from_json, to_json

# --- forming ---------------------------------------------------------------------------------------------------------


def test_a_quorum_forms_as_soon_as_all_that_live_have_reported():
    world = World(3)
    first = world.start()
    assert (first.number, first.step, first.healthy, first.behind) == (1, 0, (0, 1, 2), ())
    assert world.commits(first, 0, 1).quorum is None
    second = world.commits(first, 2).quorum
    assert (second.number, second.step, second.lineage, second.healthy) == (2, 1, 1, (0, 1, 2))
    assert [event["number"] for event in world.events("quorum_formed")] == [1], "the members did not change"


def test_the_first_quorum_waits_for_all_replicas_up_to_its_limit():
    world = World(3)
    world.hello(0)
    world.hello(1)
    world.report(0, 0, 0)
    decision = world.report(1, 0, 0)
    assert decision.quorum is None and "replica 2 is expected" in decision.reason
    assert decision.until == 600.0
    quorum = world.wait(601).quorum
    assert quorum.members == (0, 1)


def test_the_first_quorum_does_not_wait_for_one_beyond_them_that_has_left():
    world = World(2)
    world.hello(7)
    world.lose(7)
    assert world.start().members == (0, 1)


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


def test_nobody_has_a_state_so_all_load_and_report_again():
    world = World(2)
    for replica in range(2):
        world.hello(replica)
        decision = world.report(replica)
    assert decision.quorum.load and decision.quorum.healthy == (0, 1)
    world.report(0, 40, 7)
    assert world.wait(30).quorum is None, "the other one still loads"
    quorum = world.report(1, 40, 7).quorum
    assert not quorum.load and (quorum.step, quorum.lineage, quorum.healthy) == (40, 7, (0, 1))


def test_one_that_has_nothing_fetches_from_those_that_have_initialised():
    world = World(2)
    world.hello(0)
    world.hello(1)
    world.report(0, 0, 0)
    quorum = world.report(1, 0, -1).quorum
    assert (quorum.healthy, quorum.behind, quorum.load) == ((0,), (1,), False)


def test_the_paper_s_example_some_complete_a_step_and_others_do_not():
    world = World(4)
    quorum = world.start()
    world.commits(quorum, 1)
    for replica in (0, 2, 3):
        decision = world.retries(quorum, replica)
    assert (decision.quorum.step, decision.quorum.healthy, decision.quorum.behind) == (1, (1,), (0, 2, 3))


def test_of_two_that_did_the_same_step_in_different_quorums_the_newer_wins():
    world = World(2)
    quorum = world.start()
    world.lose(1)
    world.wait(0.2)
    world.retries(quorum, 0)
    alone = world.given[0, 0]
    assert alone.members == (0,)
    world.hello(1, last=quorum)
    world.report(1, quorum.step + 1, quorum.number)
    newer = world.commits(alone, 0).quorum
    assert (newer.healthy, newer.behind, newer.lineage) == ((0,), (1,), alone.number)


def test_a_quorum_says_why_these():
    world = World(3)
    quorum = world.start()
    world.leave(2, reason="rank 5 was killed")
    reason = world.commits(quorum, 0, 1).quorum.reason
    assert "replica 2 is offline: rank 5 was killed" in reason
    world.hello(2, life=1)
    quorum = world.commits(world.given[0, 0], 0, 1).quorum
    assert quorum is None, "it has said hello, so it is about to report"
    world.report(2, life=1)
    assert "replica 2 has come" in world.given[0, 0].reason
    assert world.given[0, 0].behind == (2,) and world.given[0, 0].lives[2] == 1


# --- waiting ---------------------------------------------------------------------------------------------------------


def test_a_member_that_leaves_is_left_out_at_once():
    world = World(3)
    quorum = world.start()
    world.retries(quorum, 0, 2)
    world.retries(quorum, 1, 2)
    world.leave(2)
    assert world.decide().quorum.members == (0, 1)


def test_a_broken_connection_is_waited_for_a_moment_and_a_new_one_is_the_same_life():
    world = World(2)
    quorum = world.start()
    world.lose(1)
    decision = world.commits(quorum, 0)
    assert decision.quorum is None and decision.until == pytest.approx(0.1)
    world.hello(1, last=quorum)
    assert world.commits(quorum, 1).quorum.healthy == (0, 1)
    assert not world.events("replica_offline")


def test_a_slow_member_is_waited_for_up_to_the_limit_of_its_steps():
    world = World(2)
    quorum = world.start(step_s=2.0)
    assert world.commits(quorum, 0, step_s=2.0).until == pytest.approx(3.0), "unless it beats"
    decision = world.wait(6.9)
    assert decision.quorum is None and "slower" in decision.reason
    assert world.wait(0.2).quorum.members == (0,)
    behind = world.commits(quorum, 1, step_s=2.0)
    assert behind.quorum is None
    quorum = world.commits(world.given[0, 0], 0, step_s=2.0).quorum
    assert (quorum.healthy, quorum.behind) == ((0,), (1,))


def test_a_member_that_saves_or_evaluates_is_waited_for_with_patience_once():
    world = World(2)
    quorum = world.start(step_s=2.0)
    world.aside(1)
    world.retries(quorum, 0, 1, step_s=2.0)
    decision = world.wait(60)
    assert decision.quorum is None and "busy" in decision.reason, "though a ring could not reach it"
    quorum = world.retries(quorum, 1, step_s=2.0).quorum
    assert quorum.members == (0, 1)
    world.commits(quorum, 0, step_s=2.0)
    assert world.wait(7.1).quorum.members == (0,), "it has reported since, so it is slow now"
    world.aside(1)
    assert world.commits(world.given[0, 0], 0, step_s=2.0).quorum.members == (0,), "it is no member any more"


def test_one_that_saves_remains_aside_on_a_new_connection_to_the_server():
    world = World(2)
    quorum = world.start(step_s=2.0)
    world.aside(1)
    world.lose(1)
    world.hello(1, last=quorum)
    assert world.commits(quorum, 0, step_s=2.0).quorum is None
    decision = world.wait(60)
    assert decision.quorum is None and "busy" in decision.reason


def test_one_that_is_aside_and_does_not_beat_is_waited_for_no_longer():
    world = World(2)
    quorum = world.start()
    world.aside(1)
    world.commits(quorum, 0)
    assert world.wait(2.9, beating=False).quorum is None
    assert world.wait(0.2, beating=False).quorum.members == (0,)


def test_one_that_does_not_beat_is_waited_for_no_longer():
    world = World(2)
    quorum = world.start(step_s=2.0)
    world.commits(quorum, 0, step_s=2.0)
    assert world.wait(2.9, beating=False).quorum is None
    assert world.wait(0.2, beating=False).quorum.members == (0,)


def test_a_member_that_a_ring_could_not_reach_is_waited_for_less():
    world = World(3)
    quorum = world.start()
    world.retries(quorum, 0, 2)
    world.retries(quorum, 1)
    assert world.wait(0.5).quorum is None
    assert world.wait(0.2).quorum.members == (0, 1)


def test_newcomers_wait_for_those_that_are_at_work():
    """Else they would be a quorum of their own, and go back to a checkpoint while the others train."""
    world = World(3)
    quorum = world.start()
    world.leave(2)
    quorum = world.commits(quorum, 0, 1).quorum
    world.hello(2, life=1)
    decision = world.report(2, life=1)
    assert "at work" in decision.reason and decision.until < 1e3
    assert world.wait(60).quorum is None
    quorum = world.commits(quorum, 0, 1).quorum
    assert (quorum.healthy, quorum.behind) == ((0, 1), (2,))


def test_one_about_to_arrive_is_waited_for_once_and_not_in_each_step():
    world = World(3, limits={"wait_s": 2.0, "arrive_s": 2.0})
    quorum = world.start()
    world.leave(2)
    world.arriving(2, life=1)
    decision = world.commits(quorum, 0, 1)
    assert decision.until - world.now == pytest.approx(2.0)
    quorum = world.wait(2.0).quorum
    assert quorum.members == (0, 1)
    assert world.commits(quorum, 0, 1).quorum is not None, "its time is used up"
    world.hello(2, life=1)
    decision = world.commits(world.given[0, 0], 0, 1)
    assert decision.quorum is None, "now it has said hello: it is here, and worth a wait again"
    assert world.report(2, life=1).quorum.behind == (2,)


def test_one_whose_processes_have_just_begun_is_waited_for_only_if_that_was_asked_for():
    world = World(3)
    quorum = world.start()
    world.leave(2)
    world.arriving(2, life=1)
    assert world.commits(quorum, 0, 1).quorum.members == (0, 1)


def test_the_first_quorum_does_not_wait_for_one_that_was_given_up_and_takes_it_back():
    world = World(3)
    for replica in range(2):
        world.hello(replica)
        decision = world.report(replica, 0, 0)
    assert decision.quorum is None
    world.give_up(2, life=-1)
    quorum = world.decide().quorum
    assert quorum.members == (0, 1)
    world.hello(2)
    world.report(2)
    assert world.commits(quorum, 0, 1).quorum.behind == (2,)


def test_when_all_members_have_died_the_newcomers_load():
    world = World(2)
    world.start()
    for replica in range(2):
        world.leave(replica)
        world.arriving(replica, 1)
    world.hello(0, life=1)
    assert world.report(0, life=1).quorum is None, "the other one is being built, and nobody has a state"
    world.hello(1, life=1)
    assert world.report(1, life=1).quorum.load


def test_a_further_replica_that_was_cut_off_is_waited_for_before_its_steps_are_done_again():
    world = World(2)
    quorum = world.start()
    quorum = world.commits(quorum, 0, 1).quorum
    world.leave(1)
    world.lose(0)
    world.wait(1.0)
    world.hello(1, life=1)
    decision = world.report(1, life=1)
    assert decision.quorum is None and "further" in decision.reason
    assert world.wait(6.0).quorum.load
    world = World(2)
    world.commits(world.start(), 0, 1)
    world.leave(1)
    world.leave(0)
    world.hello(1, life=1)
    assert world.report(1, life=1).quorum.load, "it has said that it goes"


def test_a_further_replica_is_waited_for_though_it_was_left_out_of_the_last_quorum():
    world = World(2)
    world.commits(world.start(), 0, 1)
    world.report(0, 2, 2)
    world.lose(1)
    world.wait(1.0)
    assert world.state.last.members == (0,)
    world.leave(0)
    world.hello(0, life=1)
    decision = world.report(0, life=1)
    assert decision.quorum is None and "replica 1 is further than all others, and may live" in decision.reason


def test_a_replica_that_has_caught_up_in_the_last_quorum_may_be_further():
    """The server does not know whether the replica has committed the step, which nobody else has any more."""
    world = World(2)
    quorum = world.start()
    world.leave(1)
    quorum = world.commits(quorum, 0).quorum
    world.hello(1, life=1)
    world.report(1, life=1)
    quorum = world.commits(quorum, 0).quorum
    assert (quorum.healthy, quorum.behind) == ((0,), (1,))
    world.leave(0)
    world.wait(1.0)
    world.hello(0, life=1)
    decision = world.report(0, life=1)
    assert decision.quorum is None and "replica 1 is further than all others, and lives" in decision.reason
    assert world.wait(20.0, beating=False).quorum.load


def test_every_further_replica_is_waited_for():
    world = World(3)
    world.commits(world.start(), 0, 1, 2)
    world.lose(0)
    world.wait(3.0)  # the wait for replica 0 is half over
    world.lose(1)
    world.leave(2)
    world.hello(2, life=1)
    world.report(2, life=1)
    world.wait(3.0)
    decision = world.decide()
    assert decision.quorum is None and "replica 1 is further" in decision.reason
    assert "replica 0" not in decision.reason
    assert world.wait(3.0).quorum.load


def test_a_new_server_waits_for_a_further_replica_that_is_in_no_quorum_of_its_own():
    before = World(3)
    quorum = before.commits(before.start(), 0, 1, 2).quorum
    world = World(3, term=1, limits={"regress_s": 8.0})
    world.hello(0, last=quorum)
    world.report(0, quorum.step, quorum.lineage, number=quorum.number)
    decision = world.wait(5.5)
    assert decision.quorum.members == (0,)
    world.leave(0)
    world.hello(2, life=1)
    decision = world.report(2, life=1)
    assert decision.quorum is None and "replica 1 is further than all others, and may live" in decision.reason
    assert world.wait(3.0).quorum.load


def test_below_the_minimum_there_is_no_quorum_and_in_the_end_a_word():
    world = World(3, min_replicas=2)
    quorum = world.start()
    world.leave(1)
    world.leave(2)
    decision = world.commits(quorum, 0)
    assert decision.quorum is None and "1 of at least 2" in decision.reason and decision.until == 1800.0
    refused = world.wait(1801)
    assert refused.refused == (0,) and "1 of at least 2" in refused.reason


def test_a_replica_beyond_those_of_the_beginning_may_join():
    world = World(2)
    quorum = world.start()
    world.hello(5)
    world.report(5)
    assert world.commits(quorum, 0, 1).quorum.members == (0, 1, 5)


# --- the end ---------------------------------------------------------------------------------------------------------


def test_those_behind_a_finished_one_are_told_so_and_it_is_not_waited_for():
    world = World(3)
    quorum = world.start()
    decision = world.commits(quorum, 0, finished=True)
    assert decision.quorum.finished and decision.to == (0,)
    world.leave(0)
    decision = world.retries(quorum, 1)
    assert decision.quorum.finished and decision.to == (1,) and decision.quorum.step == 0
    decision = world.commits(quorum, 2, finished=True)
    assert decision.quorum.finished and decision.to == (2,)


# --- suspects --------------------------------------------------------------------------------------------------------


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
        ({0: [1], 2: [1], 1: [0, 2]}, {1}),  # one that nobody reaches
        ({1: [0], 2: [1], 3: [2], 0: [3]}, set()),  # each blames the one it hears from: no evidence against anybody
        ({0: [1]}, set()),  # one against one
        ({0: [1], 2: [1]}, {1}),
        ({3: [3]}, {3}),  # its own trouble, as it says
        ({}, set()),
    ],
)
def test_who_is_left_out_of_four(suspects, left_out):
    world = World(4)
    again = fails(world, world.start(), suspects)
    assert again.members == (0, 1, 2, 3), "the first time is forgiven"
    assert set(range(4)) - set(fails(world, again, suspects).members) == left_out


def test_a_partition_between_two_ends_in_a_quorum_of_one():
    world = World(2)
    suspects = {0: [1], 1: [0]}
    quorum = fails(world, fails(world, world.start(), suspects), suspects)
    assert quorum.members == (0,) and "replica 1 is left out: replicas 0 could not reach it" in quorum.reason
    formed = world.now
    for _ in range(40):
        quorum = world.commits(quorum, 0).quorum
        assert quorum.members == (0,)
        world.wait(0.25)
    world.wait(0.6)
    assert world.commits(quorum, 0).quorum.members == (0, 1), f"it may try again {world.now - formed} s later"
    suspects = {0: [1], 1: [0]}
    for _ in range(2):
        world.commits(world.given[0, 0], 0)
        for replica in (0, 1):
            quorum = world.given[replica, 0]
            if 1 in quorum.members:
                world.retries(quorum, replica, *suspects[replica])
    assert world.state.of(1).ban.length_s >= world.options.limits.ban_s


def test_the_one_that_is_further_stays():
    returned = {0: Report(0, 0, 4, 3, (1,)), 1: Report(1, 0, 5, 9, (0,))}
    quorum = Quorum(9, 4, 3, (0, 1), (), {0: 0, 1: 0})
    assert set(judge(quorum, returned, failed=1, forgiven=1)) == {0}


def test_a_lost_member_explains_a_failure():
    world = World(4)
    quorum = world.start()
    for _ in range(2):
        for replica in quorum.members[:-1]:
            decision = world.retries(quorum, replica, (replica + 1) % len(quorum.members))
        world.leave(quorum.members[-1])
        decision = world.decide()
        assert set(quorum.members) - set(decision.quorum.members) == {quorum.members[-1]}
        quorum = decision.quorum


def test_weak_evidence_suffices_in_the_end():
    world = World(4)
    quorum, suspects = world.start(), {0: [1]}
    for _ in range(5):
        assert quorum.members == (0, 1, 2, 3)
        quorum = fails(world, quorum, suspects)
    assert quorum.members == (0, 2, 3)


def test_one_that_is_hard_to_reach_is_better_than_too_few():
    world = World(2, min_replicas=2)
    quorum, suspects = world.start(), {0: [1], 1: [0]}
    for _ in range(6):
        quorum = fails(world, quorum, suspects)
        assert quorum.members == (0, 1)


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


def test_a_new_server_goes_on_above_all_numbers_and_waits_for_the_members():
    old = World(3)
    quorum = old.commits(old.start(), 0, 1, 2).quorum
    world = World(3, term=1)
    world.given = dict(old.given)
    world.hello(0, last=quorum)
    decision = world.commits(quorum, 0)
    assert decision.quorum is None and "has not come back" in decision.reason and decision.until == 5.0
    world.hello(1, last=quorum)
    world.commits(quorum, 1)
    world.hello(2, last=quorum)
    newer = world.commits(quorum, 2).quorum
    assert newer.number == SPAN + 1 > quorum.number and newer.healthy == (0, 1, 2)


def test_a_server_that_died_between_two_answers_is_completed_by_the_next():
    old = World(2)
    first = old.start()
    second = old.commits(first, 0, 1).quorum
    world = World(2, term=1)
    world.given = {(0, 0): second, (1, 0): first}
    world.hello(1, last=first)
    assert world.report(1, 1, first.number).quorum is None
    world.hello(0, last=second)
    decision = world.decide()
    assert decision.quorum == second and decision.to == (1,) and decision.is_repeated
    assert world.commits(second, 0, 1).quorum.number == SPAN + 1


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
    assert Options(3).check().min_replicas == 1
