"""Pauses between attempts."""

from ft.net.backoff import Backoff, doubled


def test_pauses_double_up_to_the_limit_and_begin_again_after_a_success():
    backoff = Backoff(0.5, 3.0)
    assert [backoff.failed() for _ in range(4)] == [0.5, 1.0, 2.0, 3.0]
    backoff.reset()
    assert backoff.failed() == 0.5


def test_any_number_of_failures_has_a_pause():
    assert doubled(1, 0.25, 60.0) == 0.25 and doubled(10**6, 0.25, 60.0) == 60.0
