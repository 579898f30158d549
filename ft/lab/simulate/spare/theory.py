"""Closed-form estimates of SPARe (SPARe, sections 2.2 and 4): availability, failures endured, work per step, time to
train. A number in parentheses in a docstring is the number of the formula in SPARe.

N groups (replicas of the model) compute N shard types (parts of a global batch), and each type is hosted by r groups (r
is the redundancy). A group computes S types (its stack) per step. k is the number of groups lost so far. A wipe-out is
the loss of all hosts of a type; it requires a global restart from a checkpoint. A patch compute is the additional work
of the survivors for types that a group has lost in the current step. m is the mean time between two group failures of
the whole system. All times have the same unit, for example seconds.
"""

import math

from ft.base.errors import UserError
from ft.systems.spare.ruler import check_size

EULER_GAMMA = 0.57721566490153286


def checkpoint_period(save: float, failure: float, restart: float) -> float:
    """Return the time between two checkpoints at which availability is highest (1).

    Args:
        save: T_s, duration of a checkpoint.
        failure: T_f, mean time between two global restarts.
        restart: T_r, duration of a global restart.

    Raises:
        UserError: a time is negative, or ``save`` or ``failure`` is zero.
    """
    _check_times(save=save, failure=failure, restart=restart)
    return save + math.sqrt(save**2 + 2 * save * (failure + restart))


def availability(period: float, save: float, failure: float, restart: float) -> float:
    """Return the share of wall-clock time in which training progresses, with a checkpoint every ``period`` (2).

    Args:
        period: T_c, time between two checkpoints.
        save: T_s, duration of a checkpoint.
        failure: T_f, mean time between two global restarts.
        restart: T_r, duration of a global restart.

    Raises:
        UserError: as :func:`checkpoint_period`, or the period is shorter than the checkpoint.
    """
    _check_times(save=save, failure=failure, restart=restart)
    if period < save:
        raise UserError(f"a checkpoint each {period:g} s, and one takes {save:g} s", "give a longer period")
    return (1 - save / period) * failure / (failure + restart + period / 2)


def best_availability(save: float, failure: float, restart: float) -> float:
    """Return the availability at the optimal checkpoint period, 2 T_s T_f / T_c^2: (2) at the period of (1).

    Args:
        save: T_s, duration of a checkpoint.
        failure: T_f, mean time between two global restarts.
        restart: T_r, duration of a global restart.
    """
    return 2 * save * failure / checkpoint_period(save, failure, restart) ** 2


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


def restart_interval(groups: int, redundancy: int, mtbf: float) -> float:
    """Return T_f = mu m, the mean time between two global restarts.

    Args:
        groups: N, the number of groups.
        redundancy: r, the number of hosts of a type.
        mtbf: m, the mean time between two group failures of the whole system.

    Raises:
        UserError: as :func:`mu`, or the time is not positive.
    """
    _check_times(mtbf=mtbf)
    return mu(groups, redundancy) * mtbf


def time_to_train(groups: int, redundancy: int, mtbf: float, save: float, restart: float) -> float:
    """Return the time to train relative to that of plain data parallelism without failures (7).

    Checkpoints are saved at the period of (1).

    Args:
        groups: N, the number of groups.
        redundancy: r, the number of hosts of a type.
        mtbf: m, the mean time between two group failures of the whole system.
        save: T_s, duration of a checkpoint.
        restart: T_r, duration of a global restart.

    Raises:
        UserError: as :func:`mu` and :func:`checkpoint_period`.
    """
    interval = restart_interval(groups, redundancy, mtbf)
    return stack_mean(groups, redundancy) / best_availability(save, interval, restart)


def r_star(groups: int) -> int:
    """Return r*, the rule of thumb for the best redundancy, floor(log2 N + gamma / ln 2) (8).

    It is the r at which mu reaches N / 2, if r is large. It is not the r with the least time to train (7).

    Raises:
        UserError: there are fewer than 2 groups.
    """
    check_size(groups)
    return math.floor(math.log2(groups) + EULER_GAMMA / math.log(2))


_POSITIVE = {"save", "failure", "mtbf"}
_NAMES = {
    "save": "the time of a checkpoint",
    "failure": "the time between global restarts",
    "restart": "the time of a global restart",
    "mtbf": "the time between failures",
}


def _check_times(**times: float) -> None:
    for name, value in times.items():
        if not math.isfinite(value) or value < 0 or (value == 0 and name in _POSITIVE):
            least = "above 0" if name in _POSITIVE else "of 0 or more"
            raise UserError(f"{_NAMES[name]} is {value:g} s", f"give a time {least}")
