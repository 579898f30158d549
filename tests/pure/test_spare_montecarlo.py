"""Random failures up to the wipe-out: against an exact expectation, the paper's tables, and the interpreted core."""

import importlib.util
from math import comb

import numpy as np
import pytest
from closed_forms import spare_tables, trials

from ft.systems.spare.controller import Controller
from ft.systems.spare.placement import Placement
from ft.systems.spare.ruler import ruler

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
