"""Monte Carlo simulation: groups fail one after the other in random order until the first wipe-out."""

import math
from dataclasses import dataclass

import numpy as np

from ft.base.errors import UserError
from ft.systems.spare.controller.engine import engine, initial, state_of
from ft.systems.spare.placement import Placement


@dataclass(frozen=True)
class Outcome:
    """The results of a number of trials.

    Attributes:
        trials: number of trials.
        failures_mean: mean number of failures per trial, including the fatal one.
        failures_sem: its standard error; None with one trial.
        stack_mean: mean over the trials of the mean S before each of their failures.
        patch_rate: share of all non-fatal failures that needed a patch compute; None if all were fatal.
    """

    trials: int
    failures_mean: float
    failures_sem: float | None
    stack_mean: float
    patch_rate: float | None


def run_trials(placement: Placement, trials: int, seed: int, accelerate: bool | None = None) -> Outcome:
    """Run the controller through ``trials`` trials.

    Args:
        placement: the placement of shard types.
        trials: number of trials.
        seed: seed of the orders in which groups fail; with one seed, a longer run begins with the trials of a shorter
            one.
        accelerate: as for ``Controller``; results do not depend on it.

    Raises:
        UserError: ``trials`` is less than 1, or the seed is negative.
    """
    if trials < 1:
        raise UserError(f"{trials} trials tell nothing", "give 1 trial or more")
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
    """Return for each trial the number of failures including the fatal one, the sum of S before each, and the number of
    patch computes, as int64 [trials, 3]."""
    chosen = engine(accelerate)
    made, first = state_of(placement, chosen), initial(placement, chosen)
    one, counts = chosen.numbers([0]), chosen.numbers([0, 0, 0])
    rng = np.random.default_rng(seed)
    found = np.empty((trials, 3), dtype=np.int64)
    for i in range(trials):
        chosen.trial(made, first, chosen.numbers(rng.permutation(placement.groups)), one, counts)
        found[i] = counts
    return found
