"""Monte Carlo simulation of SPARe: how many group failures a placement of shard types survives.

The data of a step are divided into shard types, and each group (replica of the model) hosts several types. In each
trial, groups fail one after the other in random order until the wipe-out, the failure after which some type has no
surviving host.
"""

import math
from dataclasses import dataclass

import numpy as np

from ft.base.errors import UserError
from ft.systems.spare.controller.controller import engine, initial, state_of
from ft.systems.spare.placement import Placement


@dataclass(frozen=True)
class Outcome:
    """The results of a number of trials.

    Attributes:
        trials: number of trials.
        failures_mean: mean number of failures per trial, including the one that causes the wipe-out.
        failures_sem: standard error of ``failures_mean``; None with one trial.
        stack_mean: mean of S (the number of types that each group computes per step) before a failure, averaged over
            the failures of a trial and then over the trials.
        patch_rate: fraction of the failures before the wipe-out that needed a patch compute, in which surviving groups
            compute types that were lost in the current step; None if there were no such failures.
    """

    trials: int
    failures_mean: float
    failures_sem: float | None
    stack_mean: float
    patch_rate: float | None


def run_trials(placement: Placement, trials: int, seed: int, accelerate: bool | None = None) -> Outcome:
    """Run ``trials`` trials, in which the reordering controller (SPARe, algorithm 2) handles each failure.

    Args:
        placement: the placement of shard types.
        trials: number of trials.
        seed: seed of the orders in which groups fail. With the same seed, the first trials are the same for any number
            of trials.
        accelerate: whether to compile the controller with numba; None: if numba is installed. The results are the same.

    Raises:
        UserError: ``trials`` is less than 1 or more than 10 million, or the seed is negative.
    """
    if trials < 1:
        raise UserError(f"{trials} trials give no result", "give 1 trial or more")
    if trials > 10**7:
        raise UserError(f"{trials} trials are more than fit in memory", "give at most 10 million")
    if seed < 0:
        raise UserError(f"seed {seed} is negative", "give a seed of 0 or more")
    found = played(placement, trials, seed, accelerate)
    failures, stacks, patches = found.T
    endured = int((failures - 1).sum())
    return Outcome(
        trials,
        float(failures.mean()),
        float(failures.std(ddof=1) / math.sqrt(trials)) if trials > 1 else None,
        float((stacks / failures).mean()),
        float(patches.sum() / endured) if endured else None,
    )


def played(placement: Placement, trials: int, seed: int, accelerate: bool | None = None) -> np.ndarray:
    """Run the trials and return the counts of each trial, as int64 [trials, 3].

    The columns are the number of failures including the one that causes the wipe-out, the sum of S before each failure,
    and the number of patch computes. The arguments are those of :func:`run_trials`.
    """
    chosen = engine(accelerate)
    made, first = state_of(placement, chosen), initial(placement, chosen)
    one, counts = chosen.numbers([0]), chosen.numbers([0, 0, 0])
    rng = np.random.default_rng(seed)
    found = np.empty((trials, 3), dtype=np.int64)
    for i in range(trials):
        chosen.trial(made, first, chosen.numbers(rng.permutation(placement.groups)), one, counts)
        found[i] = counts
    return found
