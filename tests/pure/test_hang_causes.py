"""The cause of a hang by the structure of who waits for whom: one small case for each kind of cause."""

import random
import sys
from dataclasses import replace

import pytest
from large_looks import FAULTS, large_look

from ft.faults.hang import look as looks
from ft.faults.hang.causes import diagnose
from ft.faults.hang.format import DATA, KERNEL, LOCK, STORAGE, USER, place
from ft.faults.hang.graph import Graph
from ft.faults.hang.look import (
    ADDED,
    CHANGED,
    DEAD,
    SKIPPED,
    STOPPED,
    SWAPPED,
    Departure,
    Look,
    Operation,
    Rank,
    Thread,
    departure,
    missing_end,
)
from ft.faults.hang.series import over_time
from ft.observe.diagnose.hang import as_text
from tests.simulation.hangs.machine import Layout
from tests.simulation.hangs.run import case, count

GROUPS = {"tp": (0, 1), "dp": (0, 2), "all": (0, 1, 2)}


def op(group, sequence=1, name="all_reduce", **more):
    return Operation(group, name, sequence, **more)


def rank(number, *pending, counts=None, **more):
    """A rank that waits in the operations ``pending``."""
    counted = {one.channel: one.sequence for one in pending} | (counts or {})
    return Rank(number, f"n0.w{number}", "n0", counts=counted, operations=tuple(pending), **more)


def causes(*ranks, groups=GROUPS):
    found = diagnose(Look({one.rank: one for one in ranks}, groups))
    return [(cause.rank, cause.kind) for cause in found.causes], found


FOUR, FIVE = (op("all", sizes=(f"float32[{size}]",)) for size in (4, 5))
UNEVEN = [op("all", name="all_to_all", sizes=(f"float32[{size}]",)) for size in (3, 4, 5)]


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        pytest.param((rank(0), rank(1), rank(2)), [], id="nobody waits"),
        pytest.param((rank(0, op("tp")), rank(1, process=STOPPED, answers=False)), [(1, "stopped")], id="stopped"),
        pytest.param((rank(0, op("tp")), rank(1, process=DEAD, answers=False)), [(1, "dead")], id="dead"),
        pytest.param((rank(0, op("tp")),), [(1, "dead")], id="nothing is known of it"),
        pytest.param((rank(0, op("tp")), rank(1, answers=False)), [(1, "busy")], id="it runs without answering"),
        pytest.param((rank(0, op("tp")), rank(1, ended=True)), [(1, "missing-call")], id="it has left the loop"),
        pytest.param(
            (rank(0, op("all")), rank(1, op("all")), rank(2, op("all", name="broadcast"))),
            [(2, "mismatch")],
            id="the odd one out of three is in another operation",
        ),
        pytest.param((rank(0, FOUR), rank(1, FIVE), rank(2, FOUR)), [(1, "mismatch")], id="it has other sizes"),
        pytest.param([rank(n, part) for n, part in enumerate(UNEVEN)], [(0, "slow-link")], id="uneven all-to-all"),
    ],
)
def test_who_is_at_fault(ranks, expected):
    assert causes(*ranks)[0] == expected


def test_who_has_not_started_a_collective_is_waited_for():
    found, whole = causes(rank(0, op("tp")), rank(1), rank(2))
    assert found == [(1, "busy")]
    assert [(wait.ranks, wait.on) for wait in whole.waiting] == [([0], (1,))]


def stands(*frames):
    return (Thread("MainThread", frames, trains=True),)


@pytest.mark.parametrize(
    "frames",
    [
        ("/lib/threading.py:331 wait", "ft/worker/session.py:128 wait_closed", "ft/worker/protocol.py:202 suspect"),
        ("/checkout/ft/worker/protocol.py:58 next", "ft/worker/session.py:125 next_order"),
        ("threading.py:355 wait", "threading.py:451 wait_for", "ft/state/snapshot/store.py:171 wait"),
    ],
)
def test_a_rank_that_waits_for_the_control_plane_or_for_who_takes_its_snapshot_is_not_at_fault(frames):
    ranks = rank(0, op("tp")), rank(1, threads=stands(*frames)), rank(2)
    found, whole = causes(*ranks)
    assert found == [] and whole.waiting
    said = as_text(Look({one.rank: one for one in ranks}, GROUPS), whole)
    assert "no rank is at fault: rank 1 waits for the control plane" in said
    assert causes(ranks[0], replace(ranks[1], process=STOPPED), rank(2))[0] == [(1, "stopped")]


@pytest.mark.parametrize(
    "frames",
    [
        ("threading.py:331 wait", "user.py:3 lock", "ft/worker/protocol.py:150 train"),
        ("ft/state/snapshot/copier.py:80 copy", "ft/state/snapshot/store.py:120 take"),
        ("threading.py:331 wait",),
    ],
)
def test_a_rank_that_stands_elsewhere_is_at_fault_whatever_has_called_it(frames):
    assert causes(rank(0, op("tp")), rank(1, threads=stands(*frames)), rank(2))[0] == [(1, "busy")]


def test_the_one_at_the_end_of_a_chain_is_at_fault_and_all_others_are_delayed():
    # 1 waits for 0 in tp, 0 waits for 2 in dp, 2 is in nothing
    found, whole = causes(rank(0, op("dp")), rank(1, op("tp")), rank(2))
    assert found == [(2, "busy")]
    assert whole.causes[0].delayed == (0, 1)


def test_a_node_of_which_all_processes_are_dead_is_one_cause():
    lost = [Rank(number, f"n1.w{number}", "n1", process=DEAD, answers=False) for number in (1, 2)]
    found, whole = causes(rank(0, op("tp"), op("dp")), *lost)
    assert found == [(1, "dead")] and whole.causes[0].together == (1, 2) and whole.causes[0].delayed == (0,)
    assert "node n1 is lost" in whole.causes[0].where and "No process of node n1" in whole.causes[0].evidence[0]
    alive = Rank(2, "n1.w2", "n1", counts={"dp": 1}, operations=(op("dp", done=True),))
    assert not causes(rank(0, op("tp")), lost[0], alive)[1].causes[0].together
    look = Look({one.rank: one for one in (rank(0, op("tp"), op("dp")), *lost)}, GROUPS)
    look = replace(look, hosts={"n0": "gpu0", "n1": "gpu1"})
    named = diagnose(look)
    assert named.causes[0].where == "nowhere: node n1 (gpu1) is lost"
    assert "cause 1: dead: ranks 1-2 (n1 (gpu1))" in as_text(look, named)


def test_of_two_that_differ_the_one_that_departs_from_its_program_is_at_fault():
    usual, odd = op("tp", sizes=("float32[4]",)), op("tp", sizes=("float32[5]",))
    departed = Departure(CHANGED, usual, odd)
    assert causes(rank(0, odd, departure=departed), rank(1, usual))[0] == [(0, "mismatch")]
    assert causes(rank(0, usual), rank(1, odd, departure=departed))[0] == [(1, "mismatch")]


def test_a_circle_without_a_departure_is_a_circle():
    found, whole = causes(
        rank(0, op("tp", age_s=3.0)), rank(1, op("ep", age_s=5.0)), groups={"tp": (0, 1), "ep": (0, 1)}
    )
    assert found == [(0, "cycle")], "rank 1 has waited for it the longest"
    assert "circle: 0 -> 1 -> 0" in whole.causes[0].evidence[0]


def test_two_receives_that_wait_for_each_other_are_an_unmatched_message():
    zero, one = op("pp", name="recv", peer=1), op("pp", name="recv", peer=0)
    assert [kind for _, kind in causes(rank(0, zero), rank(1, one))[0]] == ["unmatched-message"]


@pytest.mark.parametrize(
    ("kind", "due", "named"),
    [
        (SKIPPED, op("ep"), "missing-call"),
        (SKIPPED, op("pp", name="recv", peer=0), "unmatched-message"),
        (SWAPPED, op("ep"), "cycle"),
    ],
)
def test_in_a_circle_the_rank_that_departs_from_its_program_is_at_fault(kind, due, named):
    departed = Departure(kind, due, op("tp"))
    ranks = rank(0, op("ep")), rank(1, op("tp"), departure=departed)
    assert causes(*ranks, groups={"tp": (0, 1), "ep": (0, 1)})[0] == [(1, named)]


def test_a_departure_that_all_members_share_is_nobodys_fault():
    departed = Departure(SKIPPED, op("all"), op("all"))
    ranks = [rank(number, op("all"), departure=departed) for number in range(3)]
    assert [kind for _, kind in causes(*ranks)[0]] == ["slow-link"]


def test_everybody_is_there_so_a_connection_is_slow():
    found, whole = causes(rank(0, op("tp")), rank(1, op("tp")))
    assert found[0][1] == "slow-link" and whole.causes[0].ends == (0, 1)


@pytest.mark.parametrize(("kind", "named"), [(SKIPPED, "missing-call"), (ADDED, "mismatch")])
def test_everybody_is_there_but_one_departs_from_its_program_in_that_group(kind, named):
    # gloo carries out an all-reduce of 4 numbers with one of 2: the other rank has gone on to number 2
    departed = Departure(kind, op("dp", sizes=("float32[2]",)), op("dp", sizes=("float32[4]",)))
    assert causes(rank(0, op("dp", 2)), rank(2, op("dp", 1), departure=departed))[0] == [(2, named)]
    assert causes(rank(0, op("dp", 1)), rank(2, op("dp", 1), departure=departed))[0] == [(2, named)]


def test_departures_in_other_groups_and_of_all_members_do_not_excuse_a_slow_connection():
    elsewhere, here = Departure(SKIPPED, op("tp"), op("tp")), Departure(SKIPPED, op("dp"), op("dp"))
    for one, other in ((elsewhere, None), (here, here)):
        found = causes(rank(0, op("dp"), departure=one), rank(2, op("dp"), departure=other))[0]
        assert [kind for _, kind in found] == ["slow-link"]


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
        return Look({one.rank: one for one in ranks}, {"tp": (0, 1)})

    (cause,) = over_time([moment(number) for number in range(1, 9)]).causes
    assert (cause.rank, cause.kind) == (named, "slow-link")
    assert cause.evidence[-1].endswith("any of them may be slow.") == alike
    assert alike or "Packets to and from the host of rank" in cause.evidence[-1]


def test_an_operation_in_the_background_is_no_wait():
    sent = op("pp", name="send", peer=1, awaited=False)
    assert Graph(Look({0: rank(0, sent), 1: rank(1)}, {"pp": (0, 1)})).waits == []


def test_a_slow_rank_is_told_from_those_that_happen_to_compute():
    def moment(number, culprit):
        waiting = [n for n in range(3) if n != culprit]
        there = [rank(n, op("all", number), step=number) for n in waiting]
        return Look({one.rank: one for one in (*there, rank(culprit, counts={"all": number - 1}, step=number))}, GROUPS)

    slow = over_time([moment(n, 2 if n % 4 else 1) for n in range(1, 13)])
    assert [(cause.rank, cause.kind) for cause in slow.causes] == [(2, "slow-rank")]
    assert over_time([moment(n, n % 3) for n in range(1, 13)]).causes == ()


@pytest.mark.parametrize(
    ("frames", "kernel", "where"),
    [
        (("torch/utils/data/dataloader.py:1 next",), "S", DATA),
        (("megatron/core/datasets/gpt_dataset.py:9 __getitem__",), "S", DATA),
        (("/usr/lib/python3.11/threading.py:320 wait", "my.py:1 f"), "S futex_wait", LOCK),
        (("torch/serialization.py:9 save",), "D io_schedule", STORAGE),
        (("my.py:3 read",), "D nfs_wait_bit", STORAGE),
        (("my.py:3 loop",), "R", USER),
        ((), "R", KERNEL),
    ],
)
def test_places(frames, kernel, where):
    assert place(Thread("MainThread", frames, True, kernel)) == where


def sequence(text):
    return [op(name, site=f"train.py:{name}") for name in text]


@pytest.mark.parametrize(
    ("before", "now", "kind"),
    [
        ("abcd", "ab", None),
        ("abcd", "abcd", None),
        ("abcd", "acd", SKIPPED),
        ("abcd", "ac", SKIPPED),
        ("abcd", "acbd", SWAPPED),
        ("abab", "baba", SKIPPED),  # the pattern repeats: what comes next shows that one was left out
        ("abcd", "axb", looks.ADDED),
    ],
)
def test_departures(before, now, kind):
    found = departure(sequence(before), sequence(now))
    assert (found and found[0]) == kind


def test_a_step_that_is_shorter_than_the_one_before_has_left_out_its_end():
    found = missing_end(sequence("abc"), sequence("ab"), sequence("a"))
    assert found is not None and (found[0], found[1].group) == (SKIPPED, "c")
    assert missing_end(sequence("abc"), sequence("ab"), []) is None, "the step has not ended yet"


def test_injected_hangs_and_slow_downs_are_named():
    first = random.SystemRandom().randrange(1 << 30)
    print(f"seeds {first} to {first + 149}")
    cases = [one for one in map(case, range(first, first + 150)) if one is not None and one.fault != "slow link"]
    tally = count(cases)["all"]
    assert tally.cases > 60 and len(tally.misses) <= 0.03 * tally.cases, tally.misses


# --- large runs -------------------------------------------------------------------------------------------------------


def lines_run(look) -> int:
    """Return how many lines of Python the search runs; each round of a loop counts."""
    over_time([look])  # what Python does once only, such as imports, is done
    found, before = 0, sys.gettrace()

    def trace(frame, event, argument):
        nonlocal found
        found += event == "line"
        return trace

    sys.settrace(trace)
    try:
        over_time([look])
    finally:
        sys.settrace(before)
    return found


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize(
    "layout", [Layout(tp=4, pp=4, dp=2, vpp=2), Layout(tp=2, cp=2, pp=2, dp=4, ep=2), Layout(dp=32)], ids=str
)
def test_the_search_grows_in_proportion_to_the_ranks(layout, fault):
    small, large = (lines_run(large_look(replace(layout, dp=layout.dp * factor), fault)) for factor in (2, 8))
    assert large < 1.25 * 4 * small, f"{large / small:.1f} times the lines for 4 times the ranks"


@pytest.mark.parametrize("fault, kind", [("busy", "busy"), ("node", "dead"), ("mismatch", "mismatch")])
def test_one_rank_in_the_middle_of_a_large_run_is_named_and_all_others_wait_for_it(fault, kind):
    look = large_look(Layout(tp=4, cp=2, pp=4, dp=16, ep=4, vpp=2), fault)
    first, *others = over_time([look]).causes
    assert (first.rank // 8, first.kind, others) == (256 // 8, kind, [])
    assert len(first.delayed) + len(first.guilty) == 512
