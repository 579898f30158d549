"""The share of operators that is verified, and when its fall is told."""

import pytest

from ft.systems.dmr.runtime.protection import PARTS, Coverage, missing


@pytest.mark.parametrize(
    "counts, share",
    [
        ({}, 1.0),
        ({"naive": 3, "P": 5, "opaque": 2}, 1.0),
        ({"naive": 6, "unchecked": 2}, 0.75),
        ({"D_inter": 8, "in windows": 5, "late": 3, "not in the plan": 4, "unverified": 2}, 0.75),
        ({"unchecked": 2, "unverified": 1}, 0.0),
    ],
)
def test_what_nothing_compares_is_missing(counts, share):
    assert missing(counts) == round(PARTS * (1.0 - share))


def test_a_fall_is_told_once_and_again_after_a_rise():
    coverage = Coverage()
    shares = [0.98, 0.98, 0.9, 0.9, 0.95, 0.9, 0.8999, 0.8985]
    told = [coverage.note(round(PARTS * (1.0 - share))) for share in shares]
    assert [None if one is None else round(one, 4) for one in told] == [None, None, 0.98, None, None, 0.95, None, 0.9]
    assert coverage.share == pytest.approx(0.8985)
