"""The closed forms of SPARe: every theory cell of the paper's tables, limits, and input that cannot work."""

import math

import pytest

from ft.base.errors import UserError
from ft.lab.plan.goodput.papers import spare_tables
from ft.lab.plan.spare import theory

ROWS = spare_tables()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]}-{row[1]}")
def test_the_theory_columns_of_tables_4_to_6_to_the_printed_digit(row):
    groups, redundancy, failures, _, stack, _ = row
    assert f"{theory.mu(groups, redundancy):.1f}" == failures
    assert f"{theory.stack_lower_bound(groups, redundancy):.2f}" == stack


def test_all_55_rows_are_there():
    assert len(ROWS) == len({row[:2] for row in ROWS}) == 55


def test_the_checkpoint_period_is_where_availability_is_highest():
    save, failure, restart = 60.0, 30_000.0, 3600.0

    def availability(period):  # (2)
        return (1 - save / period) * failure / (failure + restart + period / 2)

    best = theory.checkpoint_period(save, failure, restart)
    assert all(availability(best * factor) < availability(best) for factor in (0.5, 0.9, 0.99, 1.01, 1.1, 2))


def test_capacity_is_exact_where_floats_would_round():
    assert theory.capacity(3 * 10**17, 2 * 10**17) == 3
    assert [theory.capacity(6, k) for k in range(6)] == [1, 2, 2, 2, 3, 6]


def test_a_patch_is_sure_without_slots_to_spare():
    assert theory.rho(100, 0) == 1.0
    assert theory.rho(100, 50) == 1.0
    assert 0.33 < theory.rho(100, 25) < 0.34


def test_the_rule_of_thumb_is_where_half_the_groups_are_lost():
    assert [theory.r_star(n) for n in (200, 600, 1000)] == [8, 10, 10]
    for n in (64, 1000, 10**6):
        r = math.log2(n) + theory.EULER_GAMMA / math.log(2)
        assert math.gamma(1 + 1 / r) * n ** (1 - 1 / r) == pytest.approx(n / 2, rel=0.04)


@pytest.mark.parametrize(
    "call",
    [
        lambda: theory.mu(1, 2),
        lambda: theory.mu(10, 1),
        lambda: theory.mu(10, 11),
        lambda: theory.r_star(1),
        lambda: theory.rho(10, 10),
        lambda: theory.rho(10, -1),
    ],
)
def test_input_that_cannot_work_is_refused_with_a_fix(call):
    with pytest.raises(UserError) as refused:
        call()
    assert refused.value.fix
