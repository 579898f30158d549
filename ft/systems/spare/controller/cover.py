"""Test which types the first positions of the surviving groups' stacks hold (SPARe, algorithm 2, phase 0: HK-Fixed)."""

import numpy as np


def covered(orders: np.ndarray, alive: np.ndarray, stack: int) -> np.ndarray:
    """Return which types the surviving groups collect in their first ``stack`` positions.

    A committed order names one type for each slot, so that the matching of HK-Fixed is a test of coverage.

    Args:
        orders: the type at each stack position of each group, int [N, r].
        alive: which groups are alive, bool [N].
        stack: number of positions.

    Returns:
        bool [N].
    """
    found = np.zeros(len(orders), dtype=bool)
    found[orders[alive, :stack]] = True
    return found


def wiped_out(hosts: np.ndarray, alive: np.ndarray) -> np.ndarray:
    """Return the types of which no host survives, ascending. ``hosts``: int [N, r]. ``alive``: bool [N]."""
    return np.flatnonzero(~alive[hosts].any(axis=1))
