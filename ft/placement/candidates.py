"""Who may hold copies for whom: everybody in a small world; in a large one a choice that keeps the problem small."""

from collections.abc import Collection, Mapping

from ft.placement.solve import Domains

_MOST_PAIRS = 20_000
_PEERS = 8
_STEPS = 5
_LONGEST_STEP = 200


def candidates(
    owners: list[int],
    domains: Mapping[int, Domains],
    wanted: Mapping[int, list[int]],
    group_of: Mapping[int, Collection[int]],
    k: int,
) -> list[tuple[int, int]]:
    """(owner, holder) that are worth looking at.

    In a large world these are some data-parallel peers, whoever holds copies now, and the ranks with the same place in
    a few other nodes: at the same distances for all, so that nobody is everybody's, and more where these are not apart.
    """
    everyone = sorted(domains)
    if len(owners) * len(everyone) <= _MOST_PAIRS:
        return [(a, b) for a in owners for b in everyone if a != b]
    nodes: dict[Domains, list[int]] = {}
    for rank in everyone:
        nodes.setdefault(domains[rank], []).append(rank)
    order = list(nodes)
    distances = _distances(order)
    near = {node: _near(order, i, distances, k) for i, node in enumerate(order)}
    pairs = []
    for owner in owners:
        mine = domains[owner]
        seat = nodes[mine].index(owner)
        chosen = dict.fromkeys(wanted[owner])
        chosen |= dict.fromkeys(sorted(peer for peer in group_of[owner] if domains[peer] != mine)[:_PEERS])
        chosen |= dict.fromkeys(nodes[node][seat % len(nodes[node])] for node in near[mine])
        chosen.pop(owner, None)
        pairs += [(owner, holder) for holder in chosen]
    return pairs


def _near(order: list[Domains], at: int, distances: list[int], k: int) -> list[Domains]:
    """The nodes at these distances and, where they do not offer ``k`` that are apart, the next ones that do."""
    count = len(order)
    found = [order[(at + distance) % count] for distance in distances]
    taken, apart = set(order[at]), 0
    for node in found:
        if taken.isdisjoint(node):
            taken |= node
            apart += 1
    for distance in range(1, count):
        if apart > k:
            break
        node = order[(at + distance) % count]
        if taken.isdisjoint(node):
            found.append(node)
            taken |= node
            apart += 1
    return found


def _distances(order: list[Domains]) -> list[int]:
    """Steps along ``order`` that take most nodes to one that shares nothing with them or with those found before.

    The same step for all is a permutation: nobody is chosen twice.
    """
    count, found = len(order), []
    reached = [set(node) for node in order]
    for _ in range(min(_STEPS, count - 1)):
        steps = [step for step in range(1, min(count, _LONGEST_STEP)) if step not in found]
        if not steps:
            break
        best = max(steps, key=lambda d: (sum(order[(i + d) % count].isdisjoint(reached[i]) for i in range(count)), -d))
        found.append(best)
        for i in range(count):
            reached[i] |= order[(i + best) % count]
    return found
