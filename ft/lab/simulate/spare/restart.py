"""A global restart: how long it takes, and what happens to the clocks of failures meanwhile.

The paper does not say; its published results come out with ``extend``.
"""

from collections.abc import Callable

import numpy as np

from ft.lab.simulate.spare.clocks import Clocks

Ready = Callable[[int], np.ndarray]
"""n -> seconds that n groups take to restart, float [n]."""


def extend(begin: float, clocks: Clocks, ready: Ready) -> float:
    """Clocks run on. A group that fails within its restart begins it again, and all wait for the last one.

    Groups that were lost, then or before, are new when they are ready. All that are ready early age while they wait;
    those that fail then are lost in the first step. Returns the second of the end.
    """
    lost = clocks.out()
    at = begin + ready(len(clocks.due))
    clocks.renew(lost, at[lost])
    again = np.flatnonzero(clocks.due <= at)
    at[again] = clocks.due[again] + ready(len(again))
    clocks.renew(again, at[again])
    clocks.sort()
    return float(at.max())


def replace(begin: float, clocks: Clocks, ready: Ready) -> float:
    """Clocks run on. Groups that fail meanwhile are replaced at the end, as are those that failed before."""
    end = float((begin + ready(len(clocks.due))).max())
    lost = np.union1d(clocks.out(), np.flatnonzero(clocks.due <= end))
    clocks.renew(lost, np.full(len(lost), end))
    clocks.sort()
    return end


def ignore(begin: float, clocks: Clocks, ready: Ready) -> float:
    """Clocks stand still. Groups that failed before are new at the end."""
    lost = clocks.out()
    end = float((begin + ready(len(clocks.due))).max())
    clocks.due += end - begin
    clocks.renew(lost, np.full(len(lost), end))
    clocks.sort()
    return end


SEMANTICS = {"extend": extend, "replace": replace, "ignore": ignore}
