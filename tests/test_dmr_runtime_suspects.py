"""Who is blamed for iterations that keep coming out wrong: what holds for any history of attempts."""

from hypothesis import given, settings
from hypothesis import strategies as some

from ft.dmr.plan.trace import FORWARD
from ft.dmr.runtime.course import At
from ft.dmr.runtime.findings import AT_ONCE, MESSAGE, RECOMPUTATION, REDUCTION, WINDOW, Mismatch
from ft.dmr.runtime.suspects import EVICT, GIVE_UP, RETRY, Limits, Memory, decide, own_mismatches

RANKS = 4
OWN, WIRES = (AT_ONCE, RECOMPUTATION, WINDOW), (MESSAGE, REDUCTION)
NOBODY = dict.fromkeys(range(RANKS), 0)


def mismatch(how: str) -> Mismatch:
    return Mismatch(At("mm", FORWARD, 0, 0, 1, 0), how)


def attempt(**ranks: str) -> dict:
    """``r2=AT_ONCE``: rank 2 has found that."""
    return {int(name[1:]): (mismatch(how),) for name, how in ranks.items()}


found = some.lists(some.sampled_from(OWN + WIRES).map(mismatch), min_size=1, max_size=3).map(tuple)
reports = some.dictionaries(some.integers(0, RANKS - 1), found, min_size=1)
histories = some.lists(reports, min_size=1, max_size=6)
memories = some.fixed_dictionaries({rank: some.integers(0, 6) for rank in range(RANKS)})
limits = some.builds(Limits, retries=some.integers(0, 4), repeats=some.integers(1, 8))
quick = settings(max_examples=150, deadline=None, derandomize=True)


def wrong_attempts(history, rank: int) -> int:
    return sum(bool(own_mismatches(reported.get(rank, ()))) for reported in history)


@quick
@given(histories, memories, limits)
def test_it_is_tried_again_until_the_limit_and_no_longer(history, earlier, given_limits):
    outcome = decide(history, earlier, given_limits)
    assert (outcome.action == RETRY) <= (len(history) <= given_limits.retries)
    often = [
        r for r in range(RANKS) if wrong_attempts(history, r) and _counted(history, earlier, r) >= given_limits.repeats
    ]
    assert bool(often) or (outcome.action == RETRY) == (len(history) <= given_limits.retries)
    assert outcome.reason
    assert bool(outcome.ranks) == (outcome.action == EVICT)


def _counted(history, earlier, rank: int) -> int:
    return wrong_attempts(history, rank) + earlier[rank]


@quick
@given(histories, memories, limits)
def test_nobody_is_evicted_who_has_found_nothing(history, earlier, given_limits):
    outcome = decide(history, earlier, given_limits)
    for rank in outcome.ranks:
        assert any(rank in reported for reported in history)
        every_time = all(rank in reported for reported in history)
        assert every_time or _counted(history, earlier, rank) >= given_limits.repeats


@quick
@given(histories, some.integers(0, RANKS - 1), some.sampled_from(OWN))
def test_who_is_always_wrong_is_evicted_in_the_end(history, rank, how):
    history = [{**reported, rank: (mismatch(how),)} for reported in history]
    given_limits = Limits(retries=len(history) - 1, repeats=100)
    outcome = decide(history, NOBODY, given_limits)
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
    history = [attempt(r1=AT_ONCE), attempt(r2=AT_ONCE), attempt(r1=WINDOW)]
    assert [decide(history[:n], NOBODY, Limits(2)).action for n in (1, 2, 3)] == [RETRY, RETRY, GIVE_UP]
    assert decide(history[:1], NOBODY, Limits(0)).ranks == (1,)


def test_who_is_wrong_again_and_again_over_the_steps_is_evicted_at_once():
    outcome = decide([attempt(r1=AT_ONCE, r3=AT_ONCE)], {**NOBODY, 3: 4}, Limits(retries=2, repeats=5))
    assert (outcome.action, outcome.ranks) == (EVICT, (3,))
    assert decide([attempt(r3=AT_ONCE)], {**NOBODY, 3: 3}, Limits(retries=2, repeats=5)).action == RETRY
    assert decide([attempt(r3=MESSAGE)], {**NOBODY, 3: 9}, Limits(retries=2, repeats=5)).action == RETRY


def test_the_rank_s_own_executions_count_more_than_what_it_received():
    history = [attempt(r1=MESSAGE, r2=AT_ONCE)] * 3
    assert decide(history, NOBODY, Limits(2)).ranks == (2,)


def test_who_received_wrongly_each_time_is_evicted_where_others_did_not():
    history = [attempt(r1=MESSAGE, r2=MESSAGE), attempt(r1=MESSAGE), attempt(r1=MESSAGE, r3=MESSAGE)]
    assert decide(history, NOBODY, Limits(2)).ranks == (1,)
    everybody = [attempt(r0=REDUCTION, r1=REDUCTION, r2=REDUCTION, r3=REDUCTION)] * 3
    assert decide(everybody, NOBODY, Limits(2)).action == GIVE_UP


def test_wrong_attempts_are_forgotten_after_a_while():
    memory = Memory(10)
    memory.note(5, 2)
    memory.note(9, 1)
    assert [memory.before(step) for step in (9, 15, 16, 19, 20)] == [3, 3, 1, 1, 0]
