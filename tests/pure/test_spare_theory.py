"""The closed forms of SPARe: every theory cell of the paper's tables, limits, and input that cannot work."""

import math

import pytest
from spare_tables import ROWS

from ft.base.errors import UserError
from ft.lab.simulate.spare import theory


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.groups}-{row.redundancy}")
def test_the_theory_columns_of_tables_4_to_6_to_the_printed_digit(row):
    assert f"{theory.mu(row.groups, row.redundancy):.1f}" == row.failures
    assert f"{theory.stack_lower_bound(row.groups, row.redundancy):.2f}" == row.stack


def test_all_55_rows_are_there():
    assert len(ROWS) == len({row[:2] for row in ROWS}) == 55


def test_the_checkpoint_period_is_where_availability_is_highest():
    save, failure, restart = 60.0, 30_000.0, 3600.0
    best = theory.checkpoint_period(save, failure, restart)
    found = theory.availability(best, save, failure, restart)
    assert found == pytest.approx(theory.best_availability(save, failure, restart))
    assert all(theory.availability(best * f, save, failure, restart) < found for f in (0.5, 0.9, 0.99, 1.01, 1.1, 2))


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


def test_more_redundancy_pays_until_it_does_not():
    found = [theory.time_to_train(1000, r, 300.0, 60.0, 3600.0) for r in range(2, 27)]
    best = found.index(min(found))
    assert 0 < best < len(found) - 1
    assert found[: best + 1] == sorted(found[: best + 1], reverse=True)


@pytest.mark.parametrize(
    "call",
    [
        lambda: theory.mu(1, 2),
        lambda: theory.mu(10, 1),
        lambda: theory.mu(10, 11),
        lambda: theory.r_star(1),
        lambda: theory.rho(10, 10),
        lambda: theory.rho(10, -1),
        lambda: theory.checkpoint_period(-1.0, 1.0, 1.0),
        lambda: theory.checkpoint_period(0.0, 1.0, 1.0),
        lambda: theory.checkpoint_period(1.0, 1.0, math.nan),
        lambda: theory.availability(1.0, 2.0, 1.0, 1.0),
        lambda: theory.restart_interval(10, 2, 0.0),
    ],
)
def test_input_that_cannot_work_is_refused_with_a_fix(call):
    with pytest.raises(UserError) as refused:
        call()
    assert refused.value.fix
