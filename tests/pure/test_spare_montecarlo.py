"""Random failures up to the wipe-out: against an exact expectation, the paper's tables, and the interpreted core."""

import importlib.util
from math import comb

import numpy as np
import pytest

from ft.base.errors import UserError
from ft.lab.plan.goodput.papers import spare_tables
from ft.lab.plan.spare.trials import played, run_trials
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
    print(f"seed {SEED}")
    found = run_trials(placement(groups, 2), 3000, SEED, accelerate=False)
    assert found.failures_mean == pytest.approx(exact, abs=4 * found.failures_sem)
    assert found.failures_sem < 0.02 * exact


@pytest.mark.parametrize("row", [row for row in spare_tables() if row[1] in (3, 8)], ids=lambda row: str(row[:2]))
def test_the_paper_simulated_the_same(row):
    print(f"seed {SEED}")
    groups, redundancy, _, failures, _, stack = row
    found = run_trials(placement(groups, redundancy), 40, SEED)
    assert found.failures_mean == pytest.approx(float(failures), abs=5 * found.failures_sem)
    assert found.stack_mean == pytest.approx(float(stack), abs=0.03)


def test_trials_are_what_the_controller_does_loss_by_loss():
    sizes = (40, 5)
    print(f"seed {SEED}")
    rng, kept = np.random.default_rng(SEED), Controller(placement(*sizes))
    for failures, stacks, patches in played(placement(*sizes), 12, SEED, accelerate=False):
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
    print(f"seed {SEED}")
    made = placement(groups, redundancy)
    assert np.array_equal(played(made, 15, SEED, accelerate=True), played(made, 15, SEED, accelerate=False))


def test_more_trials_begin_with_those_of_fewer():
    made = placement(13, 4)
    assert np.array_equal(played(made, 9, SEED, accelerate=False)[:4], played(made, 4, SEED, accelerate=False))


def test_one_trial_has_no_standard_error():
    found = run_trials(placement(13, 4), 1, SEED, accelerate=False)
    assert found.failures_sem is None and found.failures_mean >= 4


@pytest.mark.parametrize(("trials", "seed"), [(0, 1), (-3, 1), (5, -1)])
def test_trials_and_seeds_that_make_no_sense_are_refused(trials, seed):
    with pytest.raises(UserError):
        run_trials(placement(13, 4), trials, seed)
