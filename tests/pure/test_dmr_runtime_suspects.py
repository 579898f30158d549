"""Who is blamed for iterations that keep coming out wrong: what holds for any history of attempts."""

from hypothesis import given, settings
from hypothesis import strategies as some

from ft.systems.dmr.plan.trace import FORWARD
from ft.systems.dmr.runtime.cursor import OperatorCall
from ft.systems.dmr.runtime.findings import AT_ONCE, DISPUTED, MESSAGE, RECOMPUTATION, REDUCTION, WINDOW, Mismatch
from ft.systems.dmr.runtime.suspects import (
    EVICT,
    GIVE_UP,
    RETRY,
    Limits,
    Memory,
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
limits = some.builds(Limits, retries=some.integers(0, 4), repeats=some.integers(1, 8))
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
    given_limits = Limits(retries=len(history) - 1, repeats=100)
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


def test_a_flip_that_does_not_come_back_blames_nobody():
    history = [attempt(r1=AT_ONCE), attempt("add", r2=AT_ONCE), attempt(r1=WINDOW)]
    assert [decide(history[:n], NOBODY, Limits(2)).action for n in (1, 2, 3)] == [RETRY, RETRY, GIVE_UP]
    assert decide(history[:1], NOBODY, Limits(0)).ranks == (1,)


def test_who_is_wrong_again_and_again_over_the_steps_is_evicted_at_once():
    outcome = decide([attempt(r3=AT_ONCE)], before(r3=4), Limits(retries=2, repeats=5))
    assert (outcome.action, outcome.ranks) == (EVICT, (3,))
    assert decide([attempt(r3=AT_ONCE)], before(r3=3), Limits(retries=2, repeats=5)).action == RETRY
    assert decide([attempt(r3=MESSAGE)], before(r3=9), Limits(retries=2, repeats=5)).action == RETRY


def test_an_iteration_is_taken_again_as_often_as_was_asked_for():
    asked = Limits(retries=10, repeats=5)
    for attempts in range(1, 11):
        assert decide([attempt(r1=AT_ONCE)] * attempts, before(r1=3), asked).action == RETRY
    assert decide([attempt(r1=AT_ONCE)] * 11, NOBODY, asked).ranks == (1,)
    often = [attempt(r1=AT_ONCE)] * 6 + [attempt("add", r2=AT_ONCE)] * 5
    assert decide(often, NOBODY, asked).ranks == (1,)


def test_an_operator_that_differs_everywhere_is_named_and_nobody_evicted():
    everybody = attempt("index_put_", r0=AT_ONCE, r1=WINDOW, r2=AT_ONCE, r3=RECOMPUTATION)
    outcome = decide([everybody] * 3, NOBODY, Limits(2))
    assert outcome.action == GIVE_UP
    for part in ("index_put_ differed on ranks 0, 1, 2, 3", "ft dmr selftest", "--ft-dmr-unstable"):
        assert part in f"{outcome.reason}; {outcome.fix}"
    a_stage = attempt("index_put_", r2=AT_ONCE, r3=AT_ONCE)
    outcome = decide([a_stage] * 3, NOBODY, Limits(2))
    assert (outcome.action, "index_put_ differed on ranks 2, 3" in outcome.reason) == (GIVE_UP, True)
    others = [attempt("add", r2=AT_ONCE) | attempt(r0=AT_ONCE, r1=AT_ONCE, r3=AT_ONCE)] * 3
    assert decide(others, NOBODY, Limits(2)).action == GIVE_UP, "not all devices break at a time"
    assert decide([attempt(r0=AT_ONCE)] * 3, {0: ()}, Limits(2)).ranks == (0,), "one rank is no sign of anything"


def test_an_operator_that_differs_here_and_there_evicts_nobody():
    by_turns = [attempt("index_put_", **{f"r{rank}": AT_ONCE}) for rank in (0, 2, 1)]
    outcome = decide(by_turns, NOBODY, Limits(2))
    assert (outcome.action, "index_put_ differed on ranks 0, 1, 2" in outcome.reason) == (GIVE_UP, True)
    asked = Limits(retries=2, repeats=5)
    assert decide([attempt(r1=AT_ONCE)], before(r1=9, r2=1), asked).action == RETRY, "over the steps as well"
    assert decide([attempt(r1=AT_ONCE, r2=AT_ONCE)], before(r1=9), asked).action == RETRY
    assert decide([attempt(r1=AT_ONCE)] * 3, before(r2=1), asked).ranks == (1,), "an old flip elsewhere excuses nobody"


def test_the_rank_s_own_executions_count_more_than_what_it_received():
    history = [attempt(r1=MESSAGE, r2=AT_ONCE)] * 3
    assert decide(history, NOBODY, Limits(2)).ranks == (2,)


def test_who_received_wrongly_each_time_is_evicted_where_others_did_not():
    history = [attempt(r1=MESSAGE, r2=MESSAGE), attempt(r1=MESSAGE), attempt(r1=MESSAGE, r3=MESSAGE)]
    assert decide(history, NOBODY, Limits(2)).ranks == (1,)
    assert decide([attempt(r2=MESSAGE)] * 3, NOBODY, Limits(2)).ranks == (2,), "nobody else has to have found anything"
    everybody = [attempt(r0=REDUCTION, r1=REDUCTION, r2=REDUCTION, r3=REDUCTION)] * 3
    assert decide(everybody, NOBODY, Limits(2)).action == GIVE_UP


def test_of_two_that_reduced_to_different_results_neither_is_evicted():
    assert decide([attempt(r1=DISPUTED, r2=DISPUTED)] * 3, NOBODY, Limits(2)).action == GIVE_UP
    assert decide([attempt(r1=DISPUTED, r2=DISPUTED) | attempt(r2=AT_ONCE)] * 3, NOBODY, Limits(2)).ranks == (2,)
    assert own_mismatches([mismatch(DISPUTED)]) == []


def placed(operator: str, index: int, how: str = AT_ONCE, **of_call: int) -> Mismatch:
    return Mismatch(OperatorCall(operator, FORWARD, 0, 0, 1, index, **of_call), how)


def test_what_follows_from_another_rank_s_wrong_result_is_not_blamed_on_the_receiver():
    """A wrong product on rank 1 reaches rank 0 by an all-reduce within the layer; the recomputation of both differs."""
    both = {0: (placed("add", 7), placed("mm", 9)), 1: (placed("mm", 4), placed("add", 7), placed("mm", 9))}
    assert decide([both] * 3, NOBODY, Limits(2)).ranks == (1,)
    assert {rank: [one.at.operator for one in found] for rank, found in origins(both).items()} == {
        0: [],
        1: ["mm", "add", "mm"],
    }
    elsewhere = {**both, 2: (placed("gelu", 30),), 0: (*both[0], placed("gelu", 2))}
    assert decide([elsewhere] * 3, NOBODY, Limits(2)).action == GIVE_UP, "rank 0 has an earlier mismatch of its own"


def test_an_operator_that_differs_first_here_and_then_there_is_not_reproducible():
    several = {0: (placed("index_put_", 4),), 1: (placed("index_put_", 9),)}
    outcome = decide([several] * 3, NOBODY, Limits(2))
    assert (outcome.action, "index_put_ differed on ranks 0, 1" in outcome.reason) == (GIVE_UP, True)


def test_who_is_always_the_first_is_blamed_even_if_others_go_on_with_the_same_operator():
    def units(*firsts: tuple[int, int]) -> dict:
        found: dict[int, list] = {0: [], 1: []}
        for number, of_ranks in enumerate(firsts):
            for rank, index in enumerate(of_ranks):
                found[rank].append(Mismatch(OperatorCall("add", FORWARD, 0, number, 1, index), AT_ONCE))
        return found

    assert decide([units((9, 4), (9, 4))] * 3, NOBODY, Limits(2)).ranks == (1,)
    assert decide([units((9, 4))] * 3, NOBODY, Limits(2)).action == GIVE_UP, "three times may be chance"
    by_turns = [units((9, 4), (9, 4)), units((9, 4), (3, 4)), units((9, 4), (9, 4))]
    assert decide(by_turns, NOBODY, Limits(2)).action == GIVE_UP


def test_of_a_call_that_communicates_the_rank_that_first_sends_something_else_is_blamed():
    first, second = placed("linear", 4, call=3, part=1), placed("linear", 4, call=3, part=2)
    result = placed("linear", 4, call=3)
    assert decide([{0: (result,), 1: (first, second, result), 2: (second, result)}] * 3, NOBODY, Limits(2)).ranks == (
        1,
    )
    assert decide([{0: (first, result), 1: (first, result)}] * 3, NOBODY, Limits(2)).action == GIVE_UP
    after = {0: (placed("add", 4),), 1: (result,)}
    assert decide([after] * 3, NOBODY, Limits(2)).ranks == (1,), "a call comes before the operator with its number"


def test_what_is_told_has_the_first_mismatch_of_each_unit():
    late = [placed("mm", number) for number in range(90, 10, -1)]
    other = Mismatch(OperatorCall("gelu", FORWARD, 0, 5, 1, 400), AT_ONCE)
    told = most_telling([*late, other], 10)
    assert len(told) == 10 and other in told and placed("mm", 11) in told


def test_wrong_attempts_are_forgotten_after_a_while():
    memory = Memory(10)
    memory.note(5, [(mismatch(AT_ONCE),), (mismatch(WINDOW, "add"),)])
    memory.note(9, [(), (), (mismatch(AT_ONCE),)])
    assert [len(memory.before(step)) for step in (9, 15, 16, 19, 20)] == [3, 3, 1, 1, 0]
    memory.note(30, [(mismatch(AT_ONCE, "add"), mismatch(AT_ONCE))])
    assert memory.before(31) == (frozenset({"add", "mm"}),)
