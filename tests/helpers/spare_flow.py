"""The problems of SPARe's controller, solved by SciPy's linear program as a reference for the tests.

The constraints are those of a flow, whose corners are whole numbers.
"""

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import csr_array


def least_cost(orders: np.ndarray, alive: np.ndarray, stack: int, free: int | None = None) -> int | None:
    """Return the least number of types to move so that the survivors compute all types in their first ``stack``
    positions; None: impossible. In group ``free``, moves cost nothing.

    Each type is computed by one group that holds it, and each group computes at most ``stack`` types.
    """
    types, living = len(orders), np.flatnonzero(alive)
    kinds, group = orders[living].ravel(), np.repeat(np.arange(len(living)), orders.shape[1])
    each, ones = np.arange(len(kinds)), np.ones(len(kinds))
    moves = np.tile(np.arange(orders.shape[1]) >= stack, len(living)) & (living[group] != free)
    found = linprog(
        moves.astype(float),
        A_eq=csr_array((ones, (kinds, each)), shape=(types, len(kinds))),
        b_eq=np.ones(types),
        A_ub=csr_array((ones, (group, each)), shape=(len(living), len(kinds))),
        b_ub=np.full(len(living), float(stack)),
        bounds=(0, 1),
    )
    return round(found.fun) if found.status == 0 else None


def least_stack(orders: np.ndarray, alive: np.ndarray) -> int | None:
    """Return the least stack with which the survivors compute all types in any order; None: a type is lost."""
    living = int(alive.sum())
    if len(np.unique(orders[alive])) < len(orders):
        return None
    enough = range(-(-len(orders) // living), orders.shape[1] + 1)
    return next((stack for stack in enough if least_cost(orders, alive, stack) is not None), None)
