"""Semantics of a global restart: how long it takes, and what happens to the failure clocks meanwhile.

SPARe does not specify this; its published results are reproduced with ``extend``.
"""

from collections.abc import Callable

import numpy as np

from ft.lab.simulate.spare.clocks import Clocks

Ready = Callable[[int], np.ndarray]
"""Number of groups n -> seconds that each of n groups takes to restart, float [n]."""


def extend(begin: float, clocks: Clocks, ready: Ready) -> float:
    """Let the clocks run on: a group that fails within its restart starts over, and all groups wait for the last one.

    Groups that were lost, before or during the restart, are new when they are ready. Groups that are ready early age
    while they wait; those that fail then are lost in the first step. Returns the second at which the restart ends.
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
    """Let the clocks run on, and replace groups that fail meanwhile at the end, together with those that failed before.

    Returns the second at which the restart ends.
    """
    end = float((begin + ready(len(clocks.due))).max())
    lost = np.union1d(clocks.out(), np.flatnonzero(clocks.due <= end))
    clocks.renew(lost, np.full(len(lost), end))
    clocks.sort()
    return end


def ignore(begin: float, clocks: Clocks, ready: Ready) -> float:
    """Stop the clocks during the restart. Groups that failed before are new at its end.

    Returns the second at which the restart ends.
    """
    lost = clocks.out()
    end = float((begin + ready(len(clocks.due))).max())
    clocks.due += end - begin
    clocks.renew(lost, np.full(len(lost), end))
    clocks.sort()
    return end


SEMANTICS = {"extend": extend, "replace": replace, "ignore": ignore}
