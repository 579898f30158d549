"""Who keeps whose peer copies: ``k`` holders for every logical rank, in ``k`` failure domains beside its own.

In this order of importance:

1.  no failure domain has two of a state and its copies (fewest such pairs where that cannot be);
2.  no rank holds more than its share, ``k`` copies, where that can be had;
3.  holders are data-parallel peers (the paper's rule, section V-B), others only where those will not do;
4.  copies stay where they are; at first, where the ring puts them: with the next ``k`` of the data-parallel group.

A data-parallel group whose ring, or whose placement before, has nothing against it is left alone. Otherwise it is
assigned anew within itself; only groups that find no placement within themselves are assigned together, with every
rank of the run for a holder.

An integer program finds the best assignment of a few ranks (:mod:`ft.state.placement.solve`). Many ranks are rotated
(:mod:`ft.state.placement.rotate`), which keeps the first two rules wherever domains are nested, the third where groups
and domains are alike, and does not look at the ring; after a swap what is right stays, and the program assigns the
rest.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from ft.state.placement.rotate import rotate, rotate_with_peers
from ft.state.placement.solve import Domains, Request, solve_best, solve_strictly

_MOST_PAIRS = 20_000
"""(owner, holder) pairs of one integer program, at most: it takes about a second then."""
_MOST_PROGRAMS = 3
"""Integer programs of that size for groups of different shapes, at most: what is left is rotated."""
_FEW = 12
"""Owners whose copies may move at first where others need their holders."""

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
    each: dict[Domains, Domains] = {}  # one object for all ranks of a node
    domains = {rank: each.setdefault(found := frozenset(kinds.items()), found) for rank, kinds in where.items()}
    before = before or {}
    k = min(k, len(domains) - 1)
    ring = {rank: held for group in groups for rank, held in _ring(group, k, len(domains)).items()}
    if k < 1 or len(each) == 1:
        return {rank: ring[rank] for rank in sorted(ring)}
    wanted = {rank: list(before[rank]) if before.get(rank) else ring[rank] for rank in ring}
    holders: Holders = {}
    unplaced, known = [], _Known()
    for group in groups:
        found = _within(list(group), domains, k, wanted, known, bool(before))
        if found is None:
            unplaced.append(list(group))
        else:
            holders |= found
    if unplaced:
        holders |= _across(unplaced, domains, k, wanted, holders, bool(before))
    return {rank: holders[rank] for rank in sorted(holders)}


def ring_of(rank: int, group: Sequence[int], k: int, world: int) -> list[int]:
    """The next ``k`` of the data-parallel ring; of the world's ring where the rank has no data-parallel peer."""
    return _ring(group, k, world)[rank]


def _ring(group: Sequence[int], k: int, world: int) -> Holders:
    """:func:`ring_of` for all of the group."""
    if len(group) == 1:
        return {group[0]: [(group[0] + distance) % world for distance in range(1, min(k, world - 1) + 1)]}
    size = len(group)
    distances = range(1, min(k, size - 1) + 1)
    return {rank: [group[(at + distance) % size] for distance in distances] for at, rank in enumerate(group)}


def are_apart(ranks: Sequence[int], domains: Mapping[int, Domains]) -> bool:
    """Whether no two of these ranks are in one failure domain."""
    return all(domains[a].isdisjoint(domains[b]) for i, a in enumerate(ranks) for b in ranks[i + 1 :])


class _Known:
    """Placements by shape of group: groups side by side mostly have the same. ``pairs``: in all programs so far."""

    def __init__(self):
        self.found: dict[tuple, Holders | None] = {}
        self.pairs = 0


def _within(
    group: list[int], domains: Mapping[int, Domains], k: int, wanted: Holders, known: _Known, moves: bool
) -> Holders | None:
    """A placement with holders of the group alone, nothing shared and ``k`` copies at each; None: there is none.

    Args:
        moves: there are copies already, and those that are right stay.
    """
    if len(group) <= k or _is_crowded(group, domains, k):
        return None
    if _is_fine(group, domains, k, {rank: wanted[rank] for rank in group}):
        return {rank: list(wanted[rank]) for rank in group}
    pairs = len(group) * (len(group) - 1)
    if pairs <= _MOST_PAIRS:
        shape = _shape(group, domains, wanted)
        if shape in known.found or known.pairs + pairs <= _MOST_PAIRS * _MOST_PROGRAMS:
            if shape not in known.found:
                known.pairs += pairs
                known.found[shape] = _solved(group, domains, k, wanted)
            found = known.found[shape]
            return found and {group[i]: [group[j] for j in held] for i, held in found.items()}
    if moves:
        kept = _keep(group, domains, k, wanted, dict.fromkeys(group, 0), dict.fromkeys(group, 0))
        if kept is not None:
            return {owner: _in_order(held, wanted[owner]) for owner, held in kept.items()}
    turned, shared = rotate(group, domains, k)
    return None if shared else turned


def _solved(group: list[int], domains: Mapping[int, Domains], k: int, wanted: Holders) -> Holders | None:
    """The best placement within the group, by places in it."""
    place_of = {rank: i for i, rank in enumerate(group)}
    pairs = {(a, b): float(b not in wanted[a]) for a in group for b in group if a != b}
    found = solve_strictly(Request(domains, pairs, dict.fromkeys(group, k)), k)
    return found and {
        place_of[rank]: [place_of[holder] for holder in _in_order(held, wanted[rank])] for rank, held in found.items()
    }


def _is_crowded(group: list[int], domains: Mapping[int, Domains], k: int) -> bool:
    """Whether a domain has too many of the group: its ``n`` have to take in ``k n`` copies, at most one from each other
    rank."""
    counts = Counter(domain for rank in group for domain in domains[rank])
    return max(counts.values()) * (k + 1) > len(group)


def _shape(group: list[int], domains: Mapping[int, Domains], wanted: Holders) -> tuple:
    """The group's problem, without the names of ranks and domains."""
    place_of = {rank: i for i, rank in enumerate(group)}
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
    groups: list[list[int]], domains: Mapping[int, Domains], k: int, wanted: Holders, placed: Holders, moves: bool
) -> Holders:
    """Holders for the ranks of groups that find none within themselves, among all ranks."""
    group_of = {rank: i for i, group in enumerate(groups) for rank in group}
    owners = sorted(group_of)
    load = dict.fromkeys(domains, 0)
    for held in placed.values():
        for holder in held:
            load[holder] += 1
    is_small = len(owners) * len(domains) <= _MOST_PAIRS
    found = None
    if is_small or moves:
        found = _keep(owners, domains, k, wanted, load, group_of)
    if found is None and is_small:
        everyone = sorted(domains)
        pairs = [(a, b) for a in owners for b in everyone if a != b]
        request = Request(domains, _costs(pairs, wanted, group_of, k), dict.fromkeys(owners, k), load)
        found = solve_strictly(request, k) or solve_best(request, k)
    if found is None:
        found = _turned(groups, owners, domains, k)
    return {owner: _in_order(held, wanted[owner]) for owner, held in found.items()}


def _turned(groups: list[list[int]], owners: list[int], domains: Mapping[int, Domains], k: int) -> Holders:
    """The rotation that shares least; ranks of the groups that are placed hold copies only where that helps."""
    found, shared = rotate(owners, domains, k) if len(owners) > k else ({}, math.inf)
    if not shared:
        return rotate_with_peers(groups, domains, k) or found
    others, less = rotate(sorted(domains), domains, k, owners) if len(owners) < len(domains) else ({}, math.inf)
    return others if less < shared else found


def _costs(
    pairs: Sequence[tuple[int, int]], wanted: Holders, group_of: Mapping[int, int], k: int
) -> dict[tuple[int, int], float]:
    """What (owner, holder) costs: strangers above all, then what has to move. ``group_of``: of the owners."""
    foreign = 1.0 + k * len(group_of)
    costs = {}
    for owner, holder in pairs:
        is_peer = group_of.get(holder) == group_of[owner]
        costs[owner, holder] = float(holder not in wanted[owner]) + (0.0 if is_peer else foreign)
    return costs


def _keep(
    owners: list[int],
    domains: Mapping[int, Domains],
    k: int,
    wanted: Holders,
    load: Mapping[int, int],
    group_of: Mapping[int, int],
) -> Holders | None:
    """Everything that is right stays, and only the rest is assigned: nothing can move less. Where the rest finds no
    holders with room, copies of some others may move too. None: it does not work.

    Args:
        load: copies from elsewhere, of every possible holder. group_of: the group of each owner.
    """
    load, kept = dict(load), {}
    for owner in owners:
        kept[owner] = []
        for holder in wanted[owner]:
            if load.get(holder, k) < k and are_apart([owner, *kept[owner], holder], domains):
                kept[owner].append(holder)
                load[holder] += 1
    short = [owner for owner in owners if len(kept[owner]) < k]
    found = _fill(short, domains, k, kept, load, wanted, group_of)
    if len(owners) * len(load) <= _MOST_PAIRS:  # few enough to assign all of them anew
        return found
    free = sum(count < k for count in load.values())
    most = (math.isqrt(_MOST_PAIRS) - max(len(short), free)) // k
    for more in sorted(min(count, most) for count in (_FEW, most) if found is None and most > 0):
        found = _fill(_released(owners, more, kept, load, k, short), domains, k, kept, load, wanted, group_of)
        if found is not None:
            break
    return found


def _released(owners: list[int], more: int, kept: Holders, load: dict[int, int], k: int, short: list[int]) -> list[int]:
    """``short`` and about so many further owners from all over, whose copies may go elsewhere now."""
    for owner in owners[:: -(-len(owners) // more)]:
        if len(kept[owner]) == k:
            for holder in kept[owner]:
                load[holder] -= 1
            kept[owner] = []
            short.append(owner)
    return short


def _fill(
    short: Sequence[int],
    domains: Mapping[int, Domains],
    k: int,
    kept: Holders,
    load: Mapping[int, int],
    wanted: Holders,
    group_of: Mapping[int, int],
) -> Holders | None:
    """``kept`` and what it lacks; None: those with room cannot hold it, or there are too many to find out."""
    if not short:
        return kept
    free = [holder for holder, count in load.items() if count < k]
    if len(short) * len(free) > _MOST_PAIRS:
        return None
    need = {owner: k - len(kept[owner]) for owner in short}
    pairs = [(a, b) for a in short for b in sorted(free) if a != b and b not in kept[a]]
    found = solve_strictly(Request(domains, _costs(pairs, wanted, group_of, k), need, load, kept), k)
    return found and {owner: kept[owner] + found.get(owner, []) for owner in kept}


def _in_order(holders: list[int], before: list[int]) -> list[int]:
    """Those that were there before come first, in their order: who comes first is asked first for a copy."""
    return [rank for rank in before if rank in holders] + sorted(rank for rank in holders if rank not in before)
