"""Who keeps whose peer copies: ``k`` holders for every logical rank, in ``k`` failure domains beside its own.

In this order of importance:

1.  no failure domain has two of a state and its copies (fewest such pairs where that cannot be);
2.  no rank holds more than its share, ``k`` copies, where that can be had;
3.  holders are data-parallel peers (the paper's rule, section V-B), others only where those will not do;
4.  copies stay where they are; at first, where the ring puts them: with the next ``k`` of the data-parallel group.

A data-parallel group whose ring, or whose placement before, has nothing against it is left alone. Otherwise it is
assigned anew within itself; only groups that find no placement within themselves are assigned together, with every
rank of the run for a holder.
"""

from collections.abc import Mapping, Sequence

from ft.placement.solve import Domains, Request, solve_best, solve_strictly

Holders = dict[int, list[int]]
"""Owner's logical rank -> logical ranks of its holders."""

_MOST_PAIRS = 20_000
_NEAR = 8
_STEPS = 5
_LONGEST_STEP = 200


def place(
    where: Mapping[int, Mapping[str, str]],
    groups: Sequence[Sequence[int]],
    k: int,
    before: Mapping[int, Sequence[int]] | None = None,
) -> Holders:
    """Holders for every logical rank; where the world is too small fewer than ``k``.

    Args:
        where: logical rank -> kind -> name of the failure domain it is in ("node" among the kinds).
        groups: data-parallel groups, each in ring order; every rank is in one.
        before: holders up to now, where there were any.
    """
    domains = {rank: frozenset(kinds.items()) for rank, kinds in where.items()}
    before = before or {}
    k = min(k, len(domains) - 1)
    ring = {rank: ring_of(rank, group, k, len(domains)) for group in groups for rank in group}
    if k < 1 or len(set(domains.values())) == 1:
        return {rank: ring[rank] for rank in sorted(ring)}
    wanted = {rank: list(before[rank]) if before.get(rank) else ring[rank] for rank in ring}
    holders: Holders = {}
    unplaced, known = [], {}
    for group in groups:
        found = _within(list(group), domains, k, wanted, known)
        if found is None:
            unplaced.append(list(group))
        else:
            holders |= found
    if unplaced:
        holders |= _across(unplaced, domains, k, wanted, holders)
    return {rank: holders[rank] for rank in sorted(holders)}


def ring_of(rank: int, group: Sequence[int], k: int, world: int) -> list[int]:
    """The next ``k`` of the data-parallel ring; of the world's ring where the rank has no data-parallel peer."""
    ring = list(group) if len(group) > 1 else list(range(world))
    at = ring.index(rank)
    return [ring[(at + distance) % len(ring)] for distance in range(1, min(k, len(ring) - 1) + 1)]


def are_apart(ranks: Sequence[int], domains: Mapping[int, Domains]) -> bool:
    """Whether no two of these ranks are in one failure domain."""
    return all(domains[a].isdisjoint(domains[b]) for i, a in enumerate(ranks) for b in ranks[i + 1 :])


def _within(group: list[int], domains: Mapping[int, Domains], k: int, wanted: Holders, known: dict) -> Holders | None:
    """A placement with holders of the group alone, nothing shared and ``k`` copies at each; None: there is none.

    Args:
        known: results by shape of group: groups side by side mostly have the same.
    """
    if len(group) <= k:
        return None
    if _is_fine(group, domains, k, {rank: wanted[rank] for rank in group}):
        return {rank: list(wanted[rank]) for rank in group}
    place_of = {rank: i for i, rank in enumerate(group)}
    shape = _shape(group, domains, wanted, place_of)
    if shape not in known:
        pairs = {(a, b): float(b not in wanted[a]) for a in group for b in group if a != b}
        found = solve_strictly(Request(domains, pairs, dict.fromkeys(group, k)), k)
        known[shape] = found and {
            place_of[rank]: [place_of[holder] for holder in _in_order(held, wanted[rank])]
            for rank, held in found.items()
        }
    found = known[shape]
    return found and {group[i]: [group[j] for j in held] for i, held in found.items()}


def _shape(group: list[int], domains: Mapping[int, Domains], wanted: Holders, place_of: Mapping[int, int]) -> tuple:
    """The group's problem, without the names of ranks and domains."""
    names: dict[tuple[str, str], int] = {}
    rows = []
    for rank in group:
        numbers = [names.setdefault(domain, len(names)) for domain in sorted(domains[rank])]
        rows.append((tuple(numbers), tuple(place_of.get(holder, -1) for holder in wanted[rank])))
    return tuple(rows)


def _is_fine(owners: Sequence[int], domains: Mapping[int, Domains], k: int, holders: Holders) -> bool:
    """Whether every owner has ``k`` holders among the owners, in domains of their own, and each of them holds ``k``."""
    load = dict.fromkeys(owners, 0)
    for owner in owners:
        held = holders[owner]
        if len(held) != k or not all(holder in load for holder in held) or not are_apart([owner, *held], domains):
            return False
        for holder in held:
            load[holder] += 1
    return all(count <= k for count in load.values())


def _across(
    groups: list[list[int]], domains: Mapping[int, Domains], k: int, wanted: Holders, placed: Holders
) -> Holders:
    """Holders for the ranks of groups that find none within themselves, among all ranks."""
    group_of = {rank: set(group) for group in groups for rank in group}
    owners = sorted(group_of)
    load = dict.fromkeys(domains, 0)
    for held in placed.values():
        for holder in held:
            load[holder] += 1
    pairs = _pairs(owners, domains, wanted, group_of)
    foreign = 1.0 + k * len(owners)
    costs = {(a, b): float(b not in wanted[a]) + (0.0 if b in group_of[a] else foreign) for a, b in pairs}
    found = _keep(owners, domains, k, wanted, load, costs)
    request = Request(domains, costs, dict.fromkeys(owners, k), load)
    found = found or solve_strictly(request, k) or solve_best(request, k)
    if found is None:  # not solved within the limits of the search
        return {owner: wanted[owner] for owner in owners}
    return {owner: _in_order(held, wanted[owner]) for owner, held in found.items()}


def _keep(
    owners: list[int],
    domains: Mapping[int, Domains],
    k: int,
    wanted: Holders,
    load: Mapping[int, int],
    costs: Mapping[tuple[int, int], float],
) -> Holders | None:
    """Everything that is right stays, and only the rest is assigned: nothing can move less. None: it does not work."""
    load, kept = dict(load), {}
    for owner in owners:
        kept[owner] = []
        for holder in wanted[owner]:
            if load.get(holder, k) < k and are_apart([owner, *kept[owner], holder], domains):
                kept[owner].append(holder)
                load[holder] += 1
    need = {owner: k - len(kept[owner]) for owner in owners if len(kept[owner]) < k}
    if not need:
        return kept
    pairs = {(a, b): cost for (a, b), cost in costs.items() if a in need and b not in kept[a] and load[b] < k}
    found = solve_strictly(Request(domains, pairs, need, load, kept), k)
    return found and {owner: kept[owner] + found.get(owner, []) for owner in owners}


def _pairs(
    owners: list[int], domains: Mapping[int, Domains], wanted: Holders, group_of: Mapping[int, set[int]]
) -> list[tuple[int, int]]:
    """Who may hold a copy for whom: everybody in a small world, in a large one a few of each sort.

    In a large one these are some data-parallel peers, whoever holds copies now, and the ranks with the same place in a
    few other nodes.
    """
    everyone = sorted(domains)
    if len(owners) * len(everyone) <= _MOST_PAIRS:
        return [(a, b) for a in owners for b in everyone if a != b]
    nodes: dict[Domains, list[int]] = {}
    for rank in everyone:
        nodes.setdefault(domains[rank], []).append(rank)
    order = list(nodes)
    number = {node: i for i, node in enumerate(order)}
    distances = _distances(order)
    pairs = []
    for owner in owners:
        mine = domains[owner]
        at, seat = number[mine], nodes[mine].index(owner)
        chosen = dict.fromkeys(wanted[owner])
        chosen |= dict.fromkeys(sorted(peer for peer in group_of[owner] if domains[peer] != mine)[:_NEAR])
        for distance in distances:
            there = nodes[order[(at + distance) % len(order)]]
            chosen[there[seat % len(there)]] = None
        chosen.pop(owner, None)
        pairs += [(owner, holder) for holder in chosen]
    return pairs


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


def _in_order(holders: list[int], before: list[int]) -> list[int]:
    """Those that were there before come first, in their order: who comes first is asked first for a copy."""
    return [rank for rank in before if rank in holders] + sorted(rank for rank in holders if rank not in before)
