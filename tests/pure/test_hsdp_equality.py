"""Replicas compare digests of their models and of the sums that they have received."""

import pytest
import torch

from ft.systems.hsdp.exchange import compare, table

GOOD, BAD, WORSE = (
    torch.tensor([first, second]) for first, second in ((-(2**63), 2**63 - 1), (5, -1), (-(2**63), 2**63 - 2))
)


def summed(models, sums):
    count = len(models)
    return sum(table(count, place, model, total) for place, (model, total) in enumerate(zip(models, sums, strict=True)))


def verdicts(models, sums=None):
    rows = summed(models, sums or [GOOD] * len(models))
    return [compare(rows, place) for place in range(len(models))]


def test_equal_members_commit():
    assert not any(each.problem or each.is_stale for each in verdicts([GOOD] * 3))


def test_a_member_that_catches_up_has_no_model_to_compare():
    assert not any(each.problem for each in verdicts([GOOD, None, GOOD]))


@pytest.mark.parametrize(
    ("models", "stale"),
    [
        ([GOOD, BAD, GOOD], [1]),
        ([GOOD, WORSE, GOOD], [1]),  # one bit
        ([BAD, GOOD, None, GOOD], [0]),
        ([GOOD, BAD], [0, 1]),
        ([GOOD, BAD, WORSE], [0, 1, 2]),
        ([GOOD, GOOD, BAD, BAD], [0, 1, 2, 3]),
    ],
)
def test_members_whose_model_is_not_the_majoritys_are_stale(models, stale):
    found = verdicts(models)
    assert len({each.problem for each in found}) == 1 and found[0].problem
    assert [place for place, each in enumerate(found) if each.is_stale] == stale


def test_different_sums_are_no_members_fault():
    found = verdicts([GOOD] * 3, [GOOD, GOOD, BAD])
    assert all("different sums" in each.problem and not each.is_stale for each in found)
