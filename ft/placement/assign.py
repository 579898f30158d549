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

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence

from ft.placement.candidates import candidates
from ft.placement.solve import Domains, Request, solve_best, solve_strictly

Holders = dict[int, list[int]]
"""Owner's logical rank -> logical ranks of its holders."""


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
    if len(group) <= k or _is_crowded(group, domains, k):
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


def _is_crowded(group: list[int], domains: Mapping[int, Domains], k: int) -> bool:
    """Whether a domain has too many of the group: its ``n`` have to take in ``k n`` copies, at most one from each other
    rank."""
    counts = Counter(domain for rank in group for domain in domains[rank])
    return max(counts.values()) * (k + 1) > len(group)


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
    foreign = 1.0 + k * len(owners)

    def costs(who: Collection[int]) -> dict[tuple[int, int], float]:
        pairs = candidates(sorted(who), domains, wanted, group_of, k)
        return {(a, b): float(b not in wanted[a]) + (0.0 if b in group_of[a] else foreign) for a, b in pairs}

    found = _keep(owners, domains, k, wanted, load, costs)
    if found is None:
        request = Request(domains, costs(owners), dict.fromkeys(owners, k), load)
        found = solve_strictly(request, k) or solve_best(request, k)
    if found is None:  # not solved within the limits of the search
        return {owner: wanted[owner] for owner in owners}
    return {owner: _in_order(held, wanted[owner]) for owner, held in found.items()}


def _keep(
    owners: list[int],
    domains: Mapping[int, Domains],
    k: int,
    wanted: Holders,
    load: Mapping[int, int],
    costs: Callable[[Collection[int]], dict[tuple[int, int], float]],
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
    pairs = {(a, b): cost for (a, b), cost in costs(need).items() if b not in kept[a] and load[b] < k}
    found = solve_strictly(Request(domains, pairs, need, load, kept), k)
    return found and {owner: kept[owner] + found.get(owner, []) for owner in owners}


def _in_order(holders: list[int], before: list[int]) -> list[int]:
    """Those that were there before come first, in their order: who comes first is asked first for a copy."""
    return [rank for rank in before if rank in holders] + sorted(rank for rank in holders if rank not in before)
