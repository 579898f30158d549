"""Optimal time between two checkpoints by Young (1974) and Daly (2006)."""

import math


def young(cost_s: float, mttf_s: float) -> float:
    """Return Young's estimate, sqrt(2 C M), in seconds. It is valid if the cost C is far below the mean time M.

    It minimises the expected loss per failure, M C / x + x / 2: with a checkpoint every x seconds, M / x checkpoints
    are written between two failures, and a failure discards x / 2 seconds of work on average.

    Args:
        cost_s: C, duration of writing a checkpoint, in seconds.
        mttf_s: M, mean time between two failures, in seconds.
    """
    return math.sqrt(2 * cost_s * mttf_s)


def daly(cost_s: float, mttf_s: float) -> float:
    """Return Daly's higher-order estimate in seconds, which also covers failures while a checkpoint is written.

    Args:
        cost_s: duration of writing a checkpoint, in seconds.
        mttf_s: mean time between two failures, in seconds.
    """
    if cost_s >= 2 * mttf_s:
        return mttf_s
    ratio = cost_s / (2 * mttf_s)
    return young(cost_s, mttf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost_s


def in_steps(seconds: float, step_s: float) -> int:
    """Return the number of steps, at least one, that take about ``seconds``. ``step_s``: seconds per step."""
    return max(1, round(seconds / step_s))
