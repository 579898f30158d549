"""Reference solution of SPARe, algorithm 2, phases 1 and 2, on the whole graph with SciPy.

Phase 1 (HK-Free) is a maximum flow, phase 2 (MCMF) a minimum-cost flow by shortest augmenting paths. In SPARe, each
group (replica of the model) hosts several shard types (parts of a global batch) in an order, its stack, and computes
the first S of them. Types are matched to surviving groups with capacity S. A type costs 0 in a group that has it in its
first S positions, and 1 in other hosts. Stack positions need no nodes of their own, because the order of the first S
types does not matter.
"""

from dataclasses import dataclass

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import dijkstra, maximum_flow

UNASSIGNED = -1


def smallest_stack(hosts: np.ndarray, alive: np.ndarray, from_stack: int) -> int | None:
    """Return the least S >= ``from_stack`` with which the survivors can compute every type, if stacks may be reordered.

    Args:
        hosts: the groups that host each type, int [N, r].
        alive: which groups are alive, bool [N].
        from_stack: smallest S to consider.

    Returns:
        S; None if not even S = r suffices, because a type has no surviving host.
    """
    types, redundancy = hosts.shape
    survivors = int(alive.sum())
    if survivors == 0 or not alive[hosts].any(axis=1).all():
        return None
    source, sink = 2 * types, 2 * types + 1
    kind, column = np.nonzero(alive[hosts])
    group = types + hosts[kind, column]
    living = types + np.flatnonzero(alive)
    start = np.concatenate([kind, np.full(types, source), living])
    end = np.concatenate([group, np.arange(types), np.full(survivors, sink)])
    for stack in range(max(from_stack, -(-types // survivors)), redundancy + 1):
        room = np.ones(len(start), dtype=np.int32)
        room[-survivors:] = stack
        graph = csr_array((room, (start, end)), shape=(2 * types + 2,) * 2, dtype=np.int32)
        if maximum_flow(graph, source, sink).flow_value == types:
            return stack
    return None


def min_cost(hosts: np.ndarray, orders: np.ndarray, alive: np.ndarray, stack: int) -> tuple[np.ndarray, int] | None:
    """Return the group that computes each type, such that as few types as possible have to move in a stack.

    The search starts with the types that are in the first ``stack`` positions of a surviving group, a flow without
    cost. The other types are added one by one along shortest augmenting paths, which keeps the cost minimal.

    Args:
        hosts: the groups that host each type, int [N, r].
        orders: the type at each stack position, int [N, r].
        alive: which groups are alive, bool [N].
        stack: S, the number of types that a group computes.

    Returns:
        (the group of each type, int [N]; the number of moved types); None if ``stack`` is too small.
    """
    types = len(hosts)
    kind, column = np.nonzero(alive[hosts])
    group = hosts[kind, column]
    moved = (orders[group, :stack] != kind[:, None]).all(axis=1)
    owner = np.full(types, UNASSIGNED)
    owner[kind[~moved][::-1]] = group[~moved][::-1]  # if several groups have a type: its first host
    cost = moved.astype(float)
    edges = _Edges(kind, group, cost)
    potential = np.zeros(2 * types + 2)
    for _ in range(int((owner == UNASSIGNED).sum())):
        if not _augment(edges, owner, alive, stack, potential):
            return None
    return owner, int(cost[owner[kind] == group].sum())


@dataclass(frozen=True)
class _Edges:
    """The edges of the graph: type ``kind[i]`` may go to group ``group[i]`` at ``cost[i]``."""

    kind: np.ndarray
    group: np.ndarray
    cost: np.ndarray


def _augment(edges: _Edges, owner: np.ndarray, alive: np.ndarray, stack: int, potential: np.ndarray) -> bool:
    """Assign one more type along a shortest path, updating ``owner`` and ``potential``; False if there is none."""
    types = len(owner)
    source, sink = 2 * types, 2 * types + 1
    held = owner != UNASSIGNED
    taken = owner[edges.kind] == edges.group
    roomy = np.flatnonzero(alive & (np.bincount(owner[held], minlength=types) < stack))
    waiting = np.flatnonzero(~held)
    kinds, groups = edges.kind, types + edges.group
    start = np.concatenate([np.where(taken, groups, kinds), np.full(len(waiting), source), types + roomy])
    end = np.concatenate([np.where(taken, kinds, groups), waiting, np.full(len(roomy), sink)])
    length = np.concatenate([np.where(taken, -edges.cost, edges.cost), np.zeros(len(waiting) + len(roomy))])
    graph = csr_array((length + potential[start] - potential[end], (start, end)), shape=(2 * types + 2,) * 2)
    distance, before = dijkstra(graph, indices=source, return_predecessors=True)
    if not np.isfinite(distance[sink]):
        return False
    potential += np.minimum(distance, distance[sink])
    node = before[sink]
    while node != source:
        kind = before[node]
        owner[kind], node = node - types, before[kind]
    return True
