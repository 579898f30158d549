"""Who is blamed for iterations that keep coming out wrong: what holds for any history of attempts.

Single histories are in ``conversations/blame``.
"""

from hypothesis import given, settings
from hypothesis import strategies as some
from part_conversations import mismatch

from ft.systems.dmr.runtime.suspects import (
    EVICT,
    GIVE_UP,
    RETRY,
    AttemptLimits,
    WrongAttempts,
    decide,
    most_telling,
    own_mismatches,
)

RANKS = 4
OWN, WIRES = ("AT_ONCE", "RECOMPUTATION", "WINDOW"), ("MESSAGE", "REDUCTION", "DISPUTED")
NOBODY = dict.fromkeys(range(RANKS), ())
OPERATORS = ("mm", "add", "gelu", "index_put_")


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
    unstable = (mismatch("AT_ONCE", operator),)
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


def test_two_results_without_a_majority_are_nobody_s_own_mismatch():
    assert own_mismatches([mismatch("DISPUTED")]) == []


def test_what_is_told_has_the_first_mismatch_of_each_unit():
    late = [mismatch(f"mm@{number}") for number in range(90, 10, -1)]
    other = mismatch("gelu@400#5")
    told = most_telling([*late, other], 10)
    assert len(told) == 10 and other in told and mismatch("mm@11") in told


def test_wrong_attempts_are_forgotten_after_a_while():
    memory = WrongAttempts(10)
    memory.note(5, [(mismatch("AT_ONCE"),), (mismatch("WINDOW", "add"),)])
    memory.note(9, [(), (), (mismatch("AT_ONCE"),)])
    assert [len(memory.before(step)) for step in (9, 15, 16, 19, 20)] == [3, 3, 1, 1, 0]
    memory.note(30, [(mismatch("AT_ONCE", "add"), mismatch("AT_ONCE"))])
    assert memory.before(31) == (frozenset({"add", "mm"}),)
