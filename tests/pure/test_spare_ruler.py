"""Rulers and placements: what fits is placed, and two types share at most one host.

What does not fit is in ``conversations/values/placement.txt``.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ft.base.errors import UserError
from ft.systems.spare.placement import Placement
from ft.systems.spare.ruler import OPTIMAL, check, is_distinct, largest_redundancy, most_marks, ruler

LENGTHS = [1, 3, 6, 11, 17, 25, 34, 44, 55, 72, 85, 106, 127, 151, 177, 199, 216, 246, 283, 333, 356, 372, 425, 480]
LENGTHS += [492, 553, 585]


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


def test_the_table_holds_golomb_rulers_of_the_known_optimal_lengths():
    assert [OPTIMAL[r][-1] for r in range(2, 29)] == LENGTHS
    assert all(is_distinct(marks, 2 * marks[-1] + 1) for marks in OPTIMAL.values())
    assert not any(is_distinct(marks, 2 * marks[-1]) for marks in OPTIMAL.values())


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
