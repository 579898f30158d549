"""Who is blamed for iterations that keep coming out wrong: what holds for any history of attempts."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from ft.systems.dmr.plan.trace import FORWARD
from ft.systems.dmr.runtime.cursor import OperatorCall
from ft.systems.dmr.runtime.findings import AT_ONCE, DISPUTED, MESSAGE, RECOMPUTATION, REDUCTION, WINDOW, Mismatch
from ft.systems.dmr.runtime.suspects import (
    EVICT,
    GIVE_UP,
    RETRY,
    AttemptLimits,
    WrongAttempts,
    decide,
    most_telling,
    origins,
    own_mismatches,
)

RANKS = 4
OWN, WIRES = (AT_ONCE, RECOMPUTATION, WINDOW), (MESSAGE, REDUCTION, DISPUTED)
NOBODY = dict.fromkeys(range(RANKS), ())
OPERATORS = ("mm", "add", "gelu", "index_put_")


def mismatch(how: str, operator: str = "mm") -> Mismatch:
    return Mismatch(OperatorCall(operator, FORWARD, 0, 0, 1, 0), how)


def attempt(operator: str = "mm", **ranks: str) -> dict:
    """``r2=AT_ONCE``: rank 2 has found that."""
    return {int(name[1:]): (mismatch(how, operator),) for name, how in ranks.items()}


def before(**ranks: int) -> dict:
    """``r3=4``: rank 3 has had that many wrong attempts in earlier iterations."""
    return {**NOBODY, **{int(name[1:]): (frozenset({"mm"}),) * count for name, count in ranks.items()}}


mismatches = some.builds(mismatch, some.sampled_from(OWN + WIRES), some.sampled_from(OPERATORS))
found = some.lists(mismatches, min_size=1, max_size=3).map(tuple)
reports = some.dictionaries(some.integers(0, RANKS - 1), found, min_size=1)
histories = some.lists(reports, min_size=1, max_size=6)
wrong = some.lists(some.frozensets(some.sampled_from(OPERATORS), min_size=1, max_size=2), max_size=6).map(tuple)
memories = some.fixed_dictionaries(dict.fromkeys(range(RANKS), wrong))
limits = some.builds(AttemptLimits, retries=some.integers(0, 4), repeats=some.integers(1, 8))
quick = settings(max_examples=150, deadline=None, derandomize=True)


def wrong_attempts(history, rank: int) -> int:
    return sum(bool(own_mismatches(reported.get(rank, ()))) for reported in history)


@quick
@given(histories, memories, limits)
def test_it_is_tried_again_until_the_limit_and_no_longer(history, earlier, given_limits):
    outcome = decide(history, earlier, given_limits)
    may_retry = len(history) <= given_limits.retries
    assert (outcome.action == RETRY) <= may_retry
    if may_retry and outcome.action != RETRY:
        (rank,) = outcome.ranks
        assert len(earlier[rank]) + 1 >= given_limits.repeats
    assert outcome.reason
    assert bool(outcome.ranks) == (outcome.action == EVICT)


@quick
@given(histories, memories, limits)
def test_nobody_is_evicted_who_has_found_nothing(history, earlier, given_limits):
    outcome = decide(history, earlier, given_limits)
    for rank in outcome.ranks:
        assert any(rank in reported for reported in history)
        every_time = all(rank in reported for reported in history)
        assert every_time or wrong_attempts(history, rank) + len(earlier[rank]) >= given_limits.repeats


@quick
@given(histories, memories, limits)
def test_never_are_all_ranks_evicted(history, earlier, given_limits):
    assert len(decide(history, earlier, given_limits).ranks) < RANKS


@quick
@given(histories, memories, limits, some.sampled_from(OPERATORS))
def test_nobody_is_evicted_for_an_operator_that_differs_on_several(history, earlier, given_limits, operator):
    unstable = (mismatch(AT_ONCE, operator),)
    history = [dict.fromkeys(reported, unstable) for reported in history]
    if len({rank for reported in history for rank in reported}) > 1:
        assert decide(history, NOBODY, given_limits).action in (RETRY, GIVE_UP)


@quick
@given(histories, some.integers(0, RANKS - 1), some.sampled_from(OWN))
def test_who_alone_is_always_wrong_is_evicted_in_the_end(history, rank, how):
    history = [{**reported, rank: (mismatch(how, "addmm"),)} for reported in history]
    given_limits = AttemptLimits(retries=len(history) - 1, repeats=100)
    outcome = decide(history, NOBODY, given_limits)
    if all(wrong_attempts(history, each) == len(history) for each in range(RANKS)):
        assert outcome.action == GIVE_UP
        return
    assert outcome.action == EVICT and rank in outcome.ranks
    assert all(wrong_attempts(history, each) == len(history) for each in outcome.ranks)


@quick
@given(histories, memories, limits, some.randoms(use_true_random=False))
def test_all_ranks_come_to_the_same(history, earlier, given_limits, random):
    def shuffled(values: dict) -> dict:
        items = list(values.items())
        random.shuffle(items)
        return dict(items)

    other = decide([shuffled(reported) for reported in history], shuffled(earlier), given_limits)
    assert other == decide(history, earlier, given_limits)


def placed(operator: str, index: int, how: str = AT_ONCE, **of_call: int) -> Mismatch:
    return Mismatch(OperatorCall(operator, FORWARD, 0, 0, 1, index, **of_call), how)


def units(*firsts: tuple[int, int]) -> dict:
    """For each microbatch the number of the operator at which rank 0 and rank 1 first have a mismatch."""
    of_rank = ((number, rank, index) for number, each in enumerate(firsts) for rank, index in enumerate(each))
    found: dict[int, list] = {0: [], 1: []}
    for number, rank, index in of_rank:
        found[rank].append(Mismatch(OperatorCall("add", FORWARD, 0, number, 1, index), AT_ONCE))
    return found


ONE, ONCE_MORE = attempt(r1=AT_ONCE), [attempt(r1=AT_ONCE), attempt("add", r2=AT_ONCE), attempt(r1=WINDOW)]
UNSTABLE = attempt("index_put_", r0=AT_ONCE, r1=WINDOW, r2=AT_ONCE, r3=RECOMPUTATION)
WIRED = [attempt(r1=MESSAGE, r2=MESSAGE), attempt(r1=MESSAGE), attempt(r1=MESSAGE, r3=MESSAGE)]
DISPUTE = attempt(r1=DISPUTED, r2=DISPUTED)
FOLLOWED = {0: (placed("add", 7), placed("mm", 9)), 1: (placed("mm", 4), placed("add", 7), placed("mm", 9))}
"""A wrong product on rank 1 reaches rank 0 by an all-reduce within the layer; the recomputation of both differs."""
SENT, SENT_NEXT = placed("linear", 4, call=3, part=1), placed("linear", 4, call=3, part=2)
RETURNED = placed("linear", 4, call=3)
TWICE, FIVE, TEN = AttemptLimits(2), AttemptLimits(retries=2, repeats=5), AttemptLimits(retries=10, repeats=5)
DECIDED = {
    "one flip": (ONCE_MORE[:1], NOBODY, TWICE, RETRY),
    "two flips on two ranks": (ONCE_MORE[:2], NOBODY, TWICE, RETRY),
    "flips that do not come back": (ONCE_MORE, NOBODY, TWICE, GIVE_UP),
    "one flip, no retries": (ONCE_MORE[:1], NOBODY, AttemptLimits(0), (1,)),
    "wrong again and again over the steps": ([attempt(r3=AT_ONCE)], before(r3=4), FIVE, (3,)),
    "not often enough over the steps": ([attempt(r3=AT_ONCE)], before(r3=3), FIVE, RETRY),
    "received wrongly, however often": ([attempt(r3=MESSAGE)], before(r3=9), FIVE, RETRY),
    **{f"attempt {n} of 11": ([ONE] * n, before(r1=3), TEN, RETRY) for n in range(1, 11)},
    "as many retries as asked for": ([ONE] * 11, NOBODY, TEN, (1,)),
    "the most often wrong": ([ONE] * 6 + [attempt("add", r2=AT_ONCE)] * 5, NOBODY, TEN, (1,)),
    "not all devices break at a time": (
        *([attempt("add", r2=AT_ONCE) | attempt(r0=AT_ONCE, r1=AT_ONCE, r3=AT_ONCE)] * 3, NOBODY, TWICE, GIVE_UP),
    ),
    "one rank is no sign of anything": ([attempt(r0=AT_ONCE)] * 3, {0: ()}, TWICE, (0,)),
    "unstable over the steps as well": ([ONE], before(r1=9, r2=1), FIVE, RETRY),
    "unstable now": ([attempt(r1=AT_ONCE, r2=AT_ONCE)], before(r1=9), FIVE, RETRY),
    "an old flip elsewhere excuses nobody": ([ONE] * 3, before(r2=1), FIVE, (1,)),
    "own executions count more": ([attempt(r1=MESSAGE, r2=AT_ONCE)] * 3, NOBODY, TWICE, (2,)),
    "received wrongly each time": (WIRED, NOBODY, TWICE, (1,)),
    "nobody else has to have found anything": ([attempt(r2=MESSAGE)] * 3, NOBODY, TWICE, (2,)),
    "all have reduced wrongly": ([dict.fromkeys(range(RANKS), (mismatch(REDUCTION),))] * 3, NOBODY, TWICE, GIVE_UP),
    "two results of two": ([DISPUTE] * 3, NOBODY, TWICE, GIVE_UP),
    "two results, and one has computed wrongly": ([DISPUTE | attempt(r2=AT_ONCE)] * 3, NOBODY, TWICE, (2,)),
    "it follows from another rank's": ([FOLLOWED] * 3, NOBODY, TWICE, (1,)),
    "it follows, but an earlier one does not": (
        *([{**FOLLOWED, 2: (placed("gelu", 30),), 0: (*FOLLOWED[0], placed("gelu", 2))}] * 3, NOBODY, TWICE, GIVE_UP),
    ),
    "always the first": ([units((9, 4), (9, 4))] * 3, NOBODY, TWICE, (1,)),
    "three times may be chance": ([units((9, 4))] * 3, NOBODY, TWICE, GIVE_UP),
    "first by turns": (
        *([units((9, 4), (9, 4)), units((9, 4), (3, 4)), units((9, 4), (9, 4))], NOBODY, TWICE, GIVE_UP),
    ),
    "the first to send something else": (
        *([{0: (RETURNED,), 1: (SENT, SENT_NEXT, RETURNED), 2: (SENT_NEXT, RETURNED)}] * 3, NOBODY, TWICE, (1,)),
    ),
    "both have sent something else": ([{0: (SENT, RETURNED), 1: (SENT, RETURNED)}] * 3, NOBODY, TWICE, GIVE_UP),
    "a call comes before the operator with its number": (
        *([{0: (placed("add", 4),), 1: (RETURNED,)}] * 3, NOBODY, TWICE, (1,)),
    ),
}


@pytest.mark.parametrize("name", DECIDED)
def test_who_is_blamed(name):
    attempts, earlier, given_limits, expected = DECIDED[name]
    outcome = decide(attempts, earlier, given_limits)
    assert (outcome.ranks if outcome.action == EVICT else outcome.action) == expected


@pytest.mark.parametrize(
    "attempts, ranks",
    [
        ([UNSTABLE] * 3, "0, 1, 2, 3"),
        ([attempt("index_put_", r2=AT_ONCE, r3=AT_ONCE)] * 3, "2, 3"),
        ([attempt("index_put_", **{f"r{rank}": AT_ONCE}) for rank in (0, 2, 1)], "0, 1, 2"),
        ([{0: (placed("index_put_", 4),), 1: (placed("index_put_", 9),)}] * 3, "0, 1"),
    ],
)
def test_an_operator_that_differs_on_several_ranks_is_named_and_nobody_evicted(attempts, ranks):
    outcome = decide(attempts, NOBODY, TWICE)
    assert outcome.action == GIVE_UP
    for part in (f"index_put_ differed on ranks {ranks}", "ft dmr selftest", "--ft-dmr-unstable"):
        assert part in f"{outcome.reason}; {outcome.fix}"


def test_what_follows_from_another_rank_s_wrong_result_does_not_begin_there():
    begun = {rank: [one.at.operator for one in found] for rank, found in origins(FOLLOWED).items()}
    assert begun == {0: [], 1: ["mm", "add", "mm"]}
    assert own_mismatches([mismatch(DISPUTED)]) == []


def test_what_is_told_has_the_first_mismatch_of_each_unit():
    late = [placed("mm", number) for number in range(90, 10, -1)]
    other = Mismatch(OperatorCall("gelu", FORWARD, 0, 5, 1, 400), AT_ONCE)
    told = most_telling([*late, other], 10)
    assert len(told) == 10 and other in told and placed("mm", 11) in told


def test_wrong_attempts_are_forgotten_after_a_while():
    memory = WrongAttempts(10)
    memory.note(5, [(mismatch(AT_ONCE),), (mismatch(WINDOW, "add"),)])
    memory.note(9, [(), (), (mismatch(AT_ONCE),)])
    assert [len(memory.before(step)) for step in (9, 15, 16, 19, 20)] == [3, 3, 1, 1, 0]
    memory.note(30, [(mismatch(AT_ONCE, "add"), mismatch(AT_ONCE))])
    assert memory.before(31) == (frozenset({"add", "mm"}),)
