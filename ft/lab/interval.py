"""How often to write a checkpoint: Young (1974) and Daly (2006)."""

import math


def young(cost_s: float, mttf_s: float) -> float:
    """Seconds between checkpoints that cost least: sqrt(2 C M), where C is far below M.

    It is exactly the least of the model in ``ft.lab.plan.disruption.model`` with uniform replay, in which M seconds of
    progress lie between two failures: the derivative of M C / x + x / 2 is zero there.
    """
    return math.sqrt(2 * cost_s * mttf_s)


def daly(cost_s: float, mttf_s: float) -> float:
    """Daly's higher-order estimate, which also counts failures that strike while a checkpoint is being written."""
    if cost_s >= 2 * mttf_s:
        return mttf_s
    ratio = cost_s / (2 * mttf_s)
    return young(cost_s, mttf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost_s


def in_steps(seconds: float, step_s: float) -> int:
    """The whole number of steps, at least one, that lasts about that long."""
    return max(1, round(seconds / step_s))
