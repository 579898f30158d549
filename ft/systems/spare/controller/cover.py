"""Test which shard types the survivors compute without any reordering (SPARe, algorithm 2, phase 0: HK-Fixed).

In SPARe, each group (replica of the model) hosts several shard types (parts of a global batch) in an order, its stack,
and computes the first S of them in every step.
"""

import numpy as np


def covered(orders: np.ndarray, alive: np.ndarray, stack: int) -> np.ndarray:
    """Return which types are in the first ``stack`` positions of a surviving group's stack.

    In a fixed order, each stack position has one type, so the matching of HK-Fixed is only a test of coverage.

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
    """Return the types of which no host survives, in ascending order.

    Args:
        hosts: the groups that host each type, int [N, r].
        alive: which groups are alive, bool [N].
    """
    return np.flatnonzero(~alive[hosts].any(axis=1))
