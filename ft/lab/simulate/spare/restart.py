"""Global restarts in the simulation of SPARe: how long a restart takes, and which groups fail meanwhile.

In a global restart all data-parallel groups restart from the last checkpoint. Each group has a failure clock, the time
of its next failure. SPARe does not specify whether the clocks run during a restart, so there are three semantics;
SPARe's published results are reproduced with ``extend``.
"""

from collections.abc import Callable

import numpy as np

from ft.lab.simulate.spare.clocks import Clocks

Ready = Callable[[int], np.ndarray]
"""Function: number of groups n -> seconds that each of n groups takes to restart, float [n]."""


def extend(begin: float, clocks: Clocks, ready: Ready) -> float:
    """Let the clocks run during the restart, and restart a group that fails again, so that all groups wait for it.

    Groups that were lost, before or during the restart, get new clocks when they are ready. The clocks of groups that
    are ready early run while these groups wait; a group that fails then is lost in the first step.

    Args:
        begin: time in seconds at which the restart begins.
        clocks: failure clocks of all groups.
        ready: draws the restart times of groups.

    Returns:
        The time in seconds at which the restart ends.
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
    """Let the clocks run during the restart. At its end, replace the groups that failed meanwhile or before.

    Args:
        begin: time in seconds at which the restart begins.
        clocks: failure clocks of all groups.
        ready: draws the restart times of groups.

    Returns:
        The time in seconds at which the restart ends.
    """
    end = float((begin + ready(len(clocks.due))).max())
    lost = np.union1d(clocks.out(), np.flatnonzero(clocks.due <= end))
    clocks.renew(lost, np.full(len(lost), end))
    clocks.sort()
    return end


def ignore(begin: float, clocks: Clocks, ready: Ready) -> float:
    """Stop the clocks during the restart. At its end, the groups that failed before get new clocks.

    Args:
        begin: time in seconds at which the restart begins.
        clocks: failure clocks of all groups.
        ready: draws the restart times of groups.

    Returns:
        The time in seconds at which the restart ends.
    """
    lost = clocks.out()
    end = float((begin + ready(len(clocks.due))).max())
    clocks.due += end - begin
    clocks.renew(lost, np.full(len(lost), end))
    clocks.sort()
    return end


SEMANTICS = {"extend": extend, "replace": replace, "ignore": ignore}
"""Value of the flag ``--clocks`` -> function."""
