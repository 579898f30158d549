"""Which groups are rebuilt after an epoch, by hand-made reports."""

import pytest

from ft.job.control.repairs import plan_rebuild
from ft.job.parts import GroupReport


def report(name="g", ranks=(0, 1), used=True, in_flight=False, collectives=3, sent=None, received=None):
    return GroupReport(name, list(ranks), used, in_flight, collectives, sent or {}, received or {})


def plan_of(replaced=(), **said):
    """``said``: r0=[reports of rank 0], ..."""
    return plan_rebuild({int(key[1:]): value for key, value in said.items()}, set(replaced))


def test_a_group_that_is_idle_and_even_is_kept():
    plan = plan_of(r0=[report(sent={1: 2})], r1=[report(received={0: 2})])
    assert (plan.keep, plan.rebuild, plan.defer) == (["g"], [], [])
    assert plan.reasons == {"g": ""}


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        ({"in_flight": True}, {}, "in an operation: rank 0"),
        ({"in_flight": True}, {"in_flight": True}, "in an operation: ranks 0, 1"),
        ({"collectives": 4}, {}, "rank 0 started 4 collectives, rank 1 3"),
        ({"sent": {1: 2}}, {"received": {0: 1}}, "rank 0 sent 2 to rank 1, which received 1"),
        ({"sent": {1: 1}}, {}, "rank 0 sent 1 to rank 1, which received 0"),
        ({}, {"received": {0: 1}}, "rank 0 sent 0 to rank 1, which received 1"),
        ({}, {"sent": {0: 1}}, "rank 1 sent 1 to rank 0, which received 0"),
        ({"ranks": (0, 1, 2)}, {}, "its members are reported differently"),
    ],
)
def test_what_speaks_against_keeping(first, second, words):
    plan = plan_of(r0=[report(**first)], r1=[report(**second)])
    assert plan.rebuild == ["g"]
    assert words in plan.reasons["g"]


def test_a_replaced_member_means_rebuild_if_a_survivor_has_used_the_group():
    plan = plan_of(replaced=[1], r0=[report()], r1=[report(used=False, collectives=0)])
    assert plan.rebuild == ["g"]
    assert plan.reasons["g"] == "replaced: rank 1"


def test_what_the_new_worker_did_while_alone_does_not_count_as_use():
    plan = plan_of(replaced=[1], r0=[report(used=False, collectives=0)], r1=[report(used=True, collectives=7)])
    assert (plan.rebuild, plan.defer) == ([], ["g"])


def test_a_replaced_member_that_has_not_reported_yet_changes_nothing():
    plan = plan_of(replaced=[1], r0=[report()])
    assert plan.rebuild == ["g"]


def test_an_unused_group_whose_connecting_was_broken_off_is_deferred():
    idle = {"used": False, "collectives": 0}
    plan = plan_of(r0=[report(in_flight=True, **idle)], r1=[report(**idle)])
    assert plan.defer == ["g"]


def test_a_group_that_a_survivor_does_not_know_is_rebuilt():
    plan = plan_of(r0=[report()], r1=[])
    assert plan.rebuild == ["g"]
    assert plan.reasons["g"] == "unknown to rank 1"


def test_a_group_of_one_member_needs_nothing_even_if_that_member_is_new():
    plan = plan_of(replaced=[0], r0=[report("own", ranks=[0])], r1=[report("other", ranks=[1], in_flight=True)])
    assert plan.keep == ["own", "other"]


def test_groups_are_judged_one_by_one_and_listed_in_order_of_creation():
    world = {"name": "world", "ranks": range(4)}
    said = {
        "r0": [report(**world), report("a", (0, 1)), report("odd", (0, 2), sent={2: 1})],
        "r1": [report(**world), report("a", (0, 1)), report("c", (1, 3), used=False, collectives=0)],
        "r2": [report(**world), report("b", (2, 3)), report("odd", (0, 2))],
        "r3": [report(**world)],
    }
    plan = plan_of(replaced=[3], **said)
    assert plan.rebuild == ["world", "odd", "b"]
    assert plan.keep == ["a"]
    assert plan.defer == ["c"]


def test_nobody_left_means_nothing_to_plan():
    assert plan_rebuild({}, {0, 1}).reasons == {}
