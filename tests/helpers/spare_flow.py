"""The controller's problems solved by means of their own: NetworkX's network simplex, for the tests to compare with."""

import networkx as nx
import numpy as np


def least_cost(orders: np.ndarray, alive: np.ndarray, stack: int, free: int | None = None) -> int | None:
    """How many types have to move so that the survivors collect all in their first ``stack`` positions; None: cannot.

    One unit of flow from each type through a group that holds it, at most ``stack`` through a group.
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
    """The least stack with which the survivors collect all types, however reordered; None: a type is lost."""
    return next((s for s in range(1, orders.shape[1] + 1) if least_cost(orders, alive, s) is not None), None)
