"""The problems of SPARe's controller, solved by NetworkX's network simplex as a reference for the tests."""

import networkx as nx
import numpy as np


def least_cost(orders: np.ndarray, alive: np.ndarray, stack: int, free: int | None = None) -> int | None:
    """Return the least number of types to move so that the survivors compute all types in their first ``stack``
    positions; None: impossible.

    One unit of flow goes from each type through a group that holds it, and at most ``stack`` units through a group.
    """
    types = len(orders)
    graph = nx.DiGraph()
    graph.add_node("sink", demand=types)
    for kind in range(types):
        graph.add_node(("type", kind), demand=-1)
    for group in np.flatnonzero(alive):
        graph.add_edge(("group", int(group)), "sink", capacity=stack)
        for position, kind in enumerate(orders[group]):
            moves = position >= stack and group != free
            graph.add_edge(("type", int(kind)), ("group", int(group)), capacity=1, weight=int(moves))
    try:
        return nx.network_simplex(graph)[0]
    except nx.NetworkXUnfeasible:
        return None


def least_stack(orders: np.ndarray, alive: np.ndarray) -> int | None:
    """Return the least stack with which the survivors compute all types in any order; None: a type is lost."""
    return next((s for s in range(1, orders.shape[1] + 1) if least_cost(orders, alive, s) is not None), None)
