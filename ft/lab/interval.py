"""Optimal checkpoint interval by Young (1974) and Daly (2006)."""

import math


def young(cost_s: float, mttf_s: float) -> float:
    """Return the optimal seconds between checkpoints by Young: sqrt(2 C M), valid where the cost C is far below the
    MTTF M.

    This is the exact optimum of the model in ``ft.lab.plan.disruption.model`` with uniform replay, in which M seconds
    of progress lie between two failures: the derivative of M C / x + x / 2 is zero there.
    """
    return math.sqrt(2 * cost_s * mttf_s)


def daly(cost_s: float, mttf_s: float) -> float:
    """Return Daly's higher-order estimate in seconds, which also covers failures during the writing of a checkpoint."""
    if cost_s >= 2 * mttf_s:
        return mttf_s
    ratio = cost_s / (2 * mttf_s)
    return young(cost_s, mttf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost_s


def in_steps(seconds: float, step_s: float) -> int:
    """Return the number of steps, at least one, that takes about ``seconds``."""
    return max(1, round(seconds / step_s))
