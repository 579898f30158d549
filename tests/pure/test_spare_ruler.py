"""Rulers and placements of SPARe, and random failures up to the wipe-out: exact expectations, the paper, brute force.

What does not fit is in ``conversations/values/placement.txt``.
"""

import importlib.util
from math import comb

import numpy as np
import pytest
from closed_forms import spare_tables, trials
from hypothesis import given, settings
from hypothesis import strategies as st

from ft.base.errors import UserError
from ft.systems.spare.controller import Controller
from ft.systems.spare.placement import Placement
from ft.systems.spare.ruler import check, largest_redundancy, most_marks, ruler


@st.composite
def sizes(draw) -> tuple[int, int]:
    """(groups, redundancy) of every kind that can be placed."""
    groups = draw(st.integers(3, 1100))
    return groups, draw(st.integers(2, largest_redundancy(groups)))


def shared(placement: Placement) -> np.ndarray:
    """The number of groups that each two types share, int [N, N]."""
    holds = np.zeros((placement.groups, placement.groups), dtype=np.float32)
    np.put_along_axis(holds, placement.orders(), 1, axis=1)
    both = holds.T @ holds
    np.fill_diagonal(both, 0)
    return both


@settings(max_examples=60, deadline=None)
@given(sizes())
def test_every_size_is_placed_with_an_overlap_of_at_most_one(size):
    groups, redundancy = size
    placement = Placement(groups, ruler(groups, redundancy))
    assert placement.redundancy == redundancy <= most_marks(groups)
    orders = placement.orders()
    assert all(sorted(column) == list(range(groups)) for column in orders.T)  # each stack is a permutation
    assert all(len(set(order)) == redundancy for order in orders.tolist())
    assert shared(placement).max() <= 1
    assert placement.max_overlap == 1
    assert check(placement.ruler, groups) == placement.ruler


@settings(max_examples=60, deadline=None)
@given(sizes())
def test_hosts_and_orders_say_the_same(size):
    placement = Placement(size[0], ruler(*size))
    for kind in range(0, size[0], max(1, size[0] // 7)):
        for position, group in enumerate(placement.hosts(kind)):
            assert placement.order(group)[position] == kind


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 600), st.lists(st.integers(0, 599), min_size=2, max_size=9))
def test_a_ruler_is_believed_exactly_where_two_types_share_at_most_one_group(groups, marks):
    marks = [0, *marks]
    fits = len({mark % groups for mark in marks}) == len(marks) and max(marks) < groups
    fits = fits and shared(Placement(groups, tuple(marks))).max() <= 1
    if fits:
        assert check(marks, groups) == tuple(marks)
    else:
        with pytest.raises(UserError):
            check(marks, groups)


# --- random failures up to the wipe-out -------------------------------------------------------------------------------


NUMBA = importlib.util.find_spec("numba") is not None
SEED = 7


def placement(groups: int, redundancy: int) -> Placement:
    return Placement(groups, ruler(groups, redundancy))


@pytest.mark.parametrize("groups", [5, 30, 200])
def test_with_two_hosts_the_mean_number_of_failures_is_exact(groups):
    """The hosts of the types are then the edges of a cycle, and no two that follow each other may fail."""
    exact = sum(groups / (groups - k) * comb(groups - k, k) / comb(groups, k) for k in range(groups // 2 + 1))
    failures = trials(placement(groups, 2), 3000, SEED, accelerate=False)[:, 0]
    assert failures.mean() == pytest.approx(exact, abs=4 * failures.std() / 3000**0.5)
    assert failures.std() / 3000**0.5 < 0.02 * exact


@pytest.mark.parametrize("row", [row for row in spare_tables() if row[1] in (3, 8)], ids=lambda row: str(row[:2]))
def test_the_paper_simulated_the_same(row):
    groups, redundancy, _, failures, _, stack = row
    found, stacks, _ = trials(placement(groups, redundancy), 40, SEED).T
    assert found.mean() == pytest.approx(float(failures), abs=5 * found.std() / 40**0.5)
    assert (stacks / found).mean() == pytest.approx(float(stack), abs=0.03)


def test_trials_are_what_the_controller_does_loss_by_loss():
    sizes = (40, 5)
    rng, kept = np.random.default_rng(SEED), Controller(placement(*sizes))
    for failures, stacks, patches in trials(placement(*sizes), 12, SEED, accelerate=False):
        kept.reset()
        seen = [0, 0, 0]
        for group in rng.permutation(sizes[0]):
            seen[0] += 1
            seen[1] += kept.stack
            done = kept.lose([group])
            if done.wipe_out:
                break
            seen[2] += bool(done.patch_types)
        assert seen == [failures, stacks, patches]


@pytest.mark.skipif(not NUMBA, reason="numba is not installed (pip install numba)")
@pytest.mark.parametrize(("groups", "redundancy"), [(7, 3), (60, 6), (200, 12)])
def test_compiled_trials_are_the_same_to_the_last_count(groups, redundancy):
    made = placement(groups, redundancy)
    assert np.array_equal(trials(made, 15, SEED, accelerate=True), trials(made, 15, SEED, accelerate=False))


def test_more_trials_begin_with_those_of_fewer():
    made = placement(13, 4)
    assert np.array_equal(trials(made, 9, SEED, accelerate=False)[:4], trials(made, 4, SEED, accelerate=False))
