"""Closed forms of the SPARe paper (sections 2.2 and 4), which ``ft plan spare theory`` shows, and its Monte Carlo.

A number in parentheses is the number of the formula in the paper. N groups (replicas of the model) compute N shard
types (parts of a global batch), and each type is hosted by r groups (r is the redundancy). A group computes S types
(its stack) per step; k groups are lost so far. A wipe-out is the loss of all hosts of a type, which requires a global
restart from a checkpoint. A patch compute is the additional work of the survivors for types that a group has lost in
the current step.
"""

import math
from typing import Any

import numpy as np

from ft.base.errors import UserError
from ft.systems.spare.controller.controller import engine, initial, state_of
from ft.systems.spare.placement import Placement
from ft.systems.spare.ruler import check_size

EULER_GAMMA = 0.57721566490153286


def checkpoint_period(save: float, failure: float, restart: float) -> float:
    """Return the time between two checkpoints at which availability is highest (1).

    Args:
        save: T_s, duration of a checkpoint.
        failure: T_f, mean time between two global restarts.
        restart: T_r, duration of a global restart. All times have the same unit.
    """
    return save + math.sqrt(save**2 + 2 * save * (failure + restart))


def mu(groups: int, redundancy: int) -> float:
    """Return mu, the mean number of group failures up to the first wipe-out (3).

    Raises:
        UserError: there are fewer than 2 groups, or the redundancy is not in 2..groups.
    """
    check_size(groups, redundancy)
    return math.gamma(1 + 1 / redundancy) * groups ** (1 - 1 / redundancy)


def capacity(groups: int, failures: int) -> int:
    """Return c(k) = ceil(N / (N - k)), the smallest S with which N - k survivors can compute N types.

    Raises:
        UserError: ``failures`` is not in 0..groups - 1.
    """
    if not 0 <= failures < groups:
        raise UserError(f"{failures} failures among {groups} groups leave no group", f"give 0 to {groups - 1} failures")
    return -(-groups // (groups - failures))


def rho(groups: int, failures: int) -> float:
    """Return rho_k, the estimated probability that the next failure after ``failures`` needs a patch compute (5).

    It is the share of stack positions whose type no other group computes. The estimate is lower than measured values at
    high redundancy.

    Raises:
        UserError: as :func:`capacity`.
    """
    stack = capacity(groups, failures)
    return 2 * groups / ((groups - failures) * stack) - 1


def stack_mean(groups: int, redundancy: int) -> float:
    """Return the mean number of types per group and step up to the first wipe-out, with patch computes (5).

    Raises:
        UserError: as :func:`mu`.
    """
    mean = mu(groups, redundancy)
    return sum(capacity(groups, k) + rho(groups, k) for k in range(math.floor(mean))) / mean


def stack_lower_bound(groups: int, redundancy: int) -> float:
    """Return the mean number of types per group and step up to the first wipe-out, without patch computes (6).

    Raises:
        UserError: as :func:`mu`.
    """
    mean = mu(groups, redundancy)
    return sum(capacity(groups, k) for k in range(math.floor(mean))) / mean


def r_star(groups: int) -> int:
    """Return r*, the rule of thumb for the best redundancy, floor(log2 N + gamma / ln 2) (8).

    It is the r at which mu reaches N / 2, if r is large. It is not the r with the least time to train (7).

    Raises:
        UserError: there are fewer than 2 groups.
    """
    check_size(groups)
    return math.floor(math.log2(groups) + EULER_GAMMA / math.log(2))


def answer(groups: int, redundancy: int, failures: int | None = None) -> dict[str, Any]:
    """Return name -> value of the closed forms for one pair of sizes.

    The result contains ``rho``, the probability that a further failure needs a patch compute, only if ``failures``, the
    number of earlier failures, is given.

    Raises:
        UserError: a size is invalid.
    """
    found: dict[str, Any] = {
        "mu": mu(groups, redundancy),
        "stack_lower_bound": stack_lower_bound(groups, redundancy),
        "stack_mean": stack_mean(groups, redundancy),
        "r_star": r_star(groups),
    }
    if failures is not None:
        found["rho"] = rho(groups, failures)
    return found


def trials(placement: Placement, number: int, seed: int, accelerate: bool | None = None) -> np.ndarray:
    """Let groups fail one after the other in random order up to the wipe-out, handled by SPARe's controller.

    Args:
        placement: the placement of shard types.
        number: number of trials.
        seed: seed of the orders in which groups fail; the first trials are the same for any number of trials.
        accelerate: whether to compile the controller with numba; None: if numba is installed. The results are the same.

    Returns:
        int64 [number, 3]: for each trial the failures, including the one that causes the wipe-out, the sum of S before
        each failure, and the number of patch computes.
    """
    chosen = engine(accelerate)
    made, first = state_of(placement, chosen), initial(placement, chosen)
    one, counts = chosen.numbers([0]), chosen.numbers([0, 0, 0])
    rng = np.random.default_rng(seed)
    found = np.empty((number, 3), dtype=np.int64)
    for i in range(number):
        chosen.trial(made, first, chosen.numbers(rng.permutation(placement.groups)), one, counts)
        found[i] = counts
    return found
