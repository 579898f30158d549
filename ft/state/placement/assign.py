"""Assigns peer copies: chooses ``k`` holders for every logical rank, in ``k`` failure domains other than its own.

Goals, the most important first:

1.  a state and its copies are all in different failure domains (or as few pairs of them as possible share a domain);
2.  no rank holds more than its share, ``k`` copies, if possible;
3.  holders are data-parallel peers (DEADPOOL, section V-B), and other ranks only if peers are not enough;
4.  copies stay where they are; the initial placement is the ring: the next ``k`` ranks of the data-parallel group.

If a data-parallel group's previous placement, or at first its ring, meets these goals, the group keeps it. Otherwise
the group gets a new placement within itself. Only groups without a valid placement within themselves are assigned
together, with every rank of the run as a possible holder.

For a few ranks, an integer program finds the best assignment (:mod:`ft.state.placement.solve`). Many ranks are placed
by rotation (:mod:`ft.state.placement.rotate`): this achieves the first two goals wherever domains are nested and the
third goal where data-parallel groups are spread over the domains in the same way, but does not start from the ring.
After a worker was replaced, valid assignments are kept, and the integer program assigns the rest.

:func:`find_problems` describes in words what a placement does not achieve.
"""

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from ft.platform.slurm import NODE
from ft.show.text import spans
from ft.state.placement import Where
from ft.state.placement.rotate import rotate, rotate_with_peers
from ft.state.placement.solve import Domains, Request, solve_best, solve_strictly

_MOST_PAIRS = 20_000
"""Maximum number of (owner, holder) pairs in one integer program, which then takes about a second."""
_MOST_PROGRAMS = 3
"""Maximum number of integer programs of that size for groups of different shapes. Further groups are placed by
rotation.
"""
_FEW = 12
"""Number of owners whose copies may be moved in a first attempt, if other owners need their holders."""

Holders = dict[int, list[int]]
"""Owner's logical rank -> logical ranks of its holders."""

Shape = tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
"""The assignment problem of a group, without names: for each rank, in order, the numbers that stand for its failure
domains, and the positions within the group of the ranks that should hold its copies."""


def place(
    where: Where,
    groups: Sequence[Sequence[int]],
    k: int,
    before: Mapping[int, Sequence[int]] | None = None,
) -> Holders:
    """Return the holders for every logical rank; fewer than ``k`` holders if the world is too small.

    Args:
        where: the failure domains of every logical rank.
        groups: data-parallel groups, each in ring order; every rank is in one group.
        k: number of copies of each rank's state.
        before: previous holders of each rank, None if nothing was placed before.
    """
    each: dict[Domains, Domains] = {}  # one object for all ranks of a node
    domains = {rank: each.setdefault(found := frozenset(kinds.items()), found) for rank, kinds in where.items()}
    before = before or {}
    k = min(k, len(domains) - 1)
    ring = {rank: held for group in groups for rank, held in _ring(group, k, len(domains)).items()}
    if k < 1 or len(each) == 1:
        return {rank: ring[rank] for rank in sorted(ring)}
    wanted = {rank: list(before[rank]) if before.get(rank) else ring[rank] for rank in ring}
    placing = _Placing(domains, k, wanted, bool(before))
    holders: Holders = {}
    unplaced: list[list[int]] = []
    for group in groups:
        within = placing.within(list(group))
        if within is None:
            unplaced.append(list(group))
        else:
            holders |= within
    if unplaced:
        holders |= placing.across(unplaced, holders)
    return {rank: holders[rank] for rank in sorted(holders)}


def ring_of(rank: int, group: Sequence[int], k: int, world: int) -> list[int]:
    """Return the ranks that hold a copy of ``rank``'s snapshot if all nodes are alike (DEADPOOL, section V-B).

    These are the next ``k`` ranks in the ring of its data-parallel group. Without data parallelism they are the next
    ranks of the world; the copy then has to contain the whole state, because no other rank has any of it. For nodes in
    several failure domains (racks, switches) see :func:`place`.

    Args:
        rank: logical rank of the owner.
        group: ranks of its data-parallel group, in ring order.
        k: number of ranks to return.
        world: number of logical ranks.

    Returns:
        at most ``k`` ranks, fewer if the ring is shorter, none in a world of one.
    """
    return _ring(group, k, world)[rank]


def _ring(group: Sequence[int], k: int, world: int) -> Holders:
    """Return :func:`ring_of` for all ranks of the group."""
    if len(group) == 1:
        return {group[0]: [(group[0] + distance) % world for distance in range(1, min(k, world - 1) + 1)]}
    size = len(group)
    distances = range(1, min(k, size - 1) + 1)
    return {rank: [group[(at + distance) % size] for distance in distances] for at, rank in enumerate(group)}


def _are_apart(ranks: Sequence[int], domains: Mapping[int, Domains]) -> bool:
    """Return whether no two of these ranks are in one failure domain."""
    return all(domains[a].isdisjoint(domains[b]) for i, a in enumerate(ranks) for b in ranks[i + 1 :])


class _Placing:
    """One placement of all groups.

    Most groups have the same shape, so that placements within a group are kept by the shape (``_shape``): as positions
    in the group, None if there is no placement.

    Args:
        domains: failure domains of each rank of the run.
        k: number of copies.
        wanted: preferred holders of each rank.
        moves: whether copies exist already, so that valid copies should stay in place.
    """

    def __init__(self, domains: Mapping[int, Domains], k: int, wanted: Holders, moves: bool):
        self._domains, self._k, self._wanted, self._moves = domains, k, wanted, moves
        self._by_shape: dict[Shape, Holders | None] = {}
        self._pairs = 0  # number of (owner, holder) pairs in all integer programs for single groups so far

    def within(self, group: list[int]) -> Holders | None:
        """Return a placement within one data-parallel group that meets goals 1 to 3, None if none was found."""
        domains, k, wanted = self._domains, self._k, self._wanted
        if len(group) <= k or self._is_crowded(group):
            return None
        if self._is_fine(group):
            return {rank: list(wanted[rank]) for rank in group}
        pairs = len(group) * (len(group) - 1)
        if pairs <= _MOST_PAIRS:
            shape = self._shape(group)
            if shape in self._by_shape or self._pairs + pairs <= _MOST_PAIRS * _MOST_PROGRAMS:
                if shape not in self._by_shape:
                    self._pairs += pairs
                    self._by_shape[shape] = self._solved(group)
                found = self._by_shape[shape]
                return found and {group[i]: [group[j] for j in held] for i, held in found.items()}
        if self._moves:
            kept = self._keep(group, dict.fromkeys(group, 0), dict.fromkeys(group, 0))
            if kept is not None:
                return {owner: _in_order(held, wanted[owner]) for owner, held in kept.items()}
        turned, shared = rotate(group, domains, k)
        return None if shared else turned

    def across(self, groups: list[list[int]], placed: Holders) -> Holders:
        """Choose holders among all ranks of the run, for groups that have no valid placement within themselves.

        ``placed`` are the holders of the ranks of all other groups.
        """
        domains, k, wanted = self._domains, self._k, self._wanted
        group_of = {rank: i for i, group in enumerate(groups) for rank in group}
        owners = sorted(group_of)
        load = dict.fromkeys(domains, 0)
        for held in placed.values():
            for holder in held:
                load[holder] += 1
        is_small = len(owners) * len(domains) <= _MOST_PAIRS
        found = None
        if is_small or self._moves:
            found = self._keep(owners, load, group_of)
        if found is None and is_small:
            everyone = sorted(domains)
            pairs = [(a, b) for a in owners for b in everyone if a != b]
            request = Request(domains, self._costs(pairs, group_of), dict.fromkeys(owners, k), load)
            found = solve_strictly(request, k) or solve_best(request, k)
        if found is None:
            found = self._turned(groups, owners)
        return {owner: _in_order(held, wanted[owner]) for owner, held in found.items()}

    def _is_crowded(self, group: list[int]) -> bool:
        """Return whether one domain has too many ranks of the group for a placement within the group.

        With even shares, the domain's ``n`` ranks hold ``k n`` copies. All of them belong to owners outside the domain,
        and each of these owners may have only one copy in the domain. So the group needs at least ``k n`` ranks outside
        it.
        """
        counts = Counter(domain for rank in group for domain in self._domains[rank])
        return max(counts.values()) * (self._k + 1) > len(group)

    def _is_fine(self, group: list[int]) -> bool:
        """Return whether every owner's wanted holders are ``k`` of the group, in separate domains, each ``k`` times."""
        load = dict.fromkeys(group, 0)
        for owner in group:
            held = self._wanted[owner]
            if len(held) != self._k or not all(holder in load for holder in held):
                return False
            if not _are_apart([owner, *held], self._domains):
                return False
            for holder in held:
                load[holder] += 1
        return all(count <= self._k for count in load.values())

    def _shape(self, group: list[int]) -> Shape:
        """Return the group's assignment problem, with ranks and domains replaced by numbers."""
        place_of = {rank: i for i, rank in enumerate(group)}
        names: dict[tuple[str, str], int] = {}
        rows = []
        for rank in group:
            numbers = [names.setdefault(domain, len(names)) for domain in sorted(self._domains[rank])]
            rows.append((tuple(numbers), tuple(place_of.get(holder, -1) for holder in self._wanted[rank])))
        return tuple(rows)

    def _solved(self, group: list[int]) -> Holders | None:
        """Return the best placement within the group by the integer program, as positions in the group."""
        k, wanted = self._k, self._wanted
        place_of = {rank: i for i, rank in enumerate(group)}
        pairs = {(a, b): float(b not in wanted[a]) for a in group for b in group if a != b}
        found = solve_strictly(Request(self._domains, pairs, dict.fromkeys(group, k)), k)
        return found and {
            place_of[rank]: [place_of[holder] for holder in _in_order(held, wanted[rank])]
            for rank, held in found.items()
        }

    def _turned(self, groups: list[list[int]], owners: list[int]) -> Holders:
        """Return the rotation with the fewest shared domains.

        Ranks of other groups, which are placed already, hold further copies only if that reduces the shared domains.
        """
        domains, k = self._domains, self._k
        found, shared = rotate(owners, domains, k) if len(owners) > k else ({}, math.inf)
        if not shared:
            return rotate_with_peers(groups, domains, k) or found
        others, less = rotate(sorted(domains), domains, k, owners) if len(owners) < len(domains) else ({}, math.inf)
        return others if less < shared else found

    def _costs(self, pairs: Sequence[tuple[int, int]], group_of: Mapping[int, int]) -> dict[tuple[int, int], float]:
        """Return the cost of each (owner, holder) pair: high for a holder outside the owner's group, low for a move."""
        foreign = 1.0 + self._k * len(group_of)
        costs = {}
        for owner, holder in pairs:
            is_peer = group_of.get(holder) == group_of[owner]
            costs[owner, holder] = float(holder not in self._wanted[owner]) + (0.0 if is_peer else foreign)
        return costs

    def _keep(self, owners: list[int], load: Mapping[int, int], group_of: Mapping[int, int]) -> Holders | None:
        """Keep all valid assignments and assign only the rest, so that as few copies as possible move.

        If the remaining owners find no holders with capacity, copies of some other owners may move too. Return None if
        this fails too.

        Args:
            owners: ranks to find holders for.
            load: number of copies that each possible holder has from other owners.
            group_of: group of each owner.
        """
        k = self._k
        load, kept = dict(load), Holders()
        for owner in owners:
            kept[owner] = []
            for holder in self._wanted[owner]:
                if load.get(holder, k) < k and _are_apart([owner, *kept[owner], holder], self._domains):
                    kept[owner].append(holder)
                    load[holder] += 1
        short = [owner for owner in owners if len(kept[owner]) < k]
        found = self._fill(short, kept, load, group_of)
        if len(owners) * len(load) <= _MOST_PAIRS:  # few enough for the integer program to reassign all of them
            return found
        free = sum(count < k for count in load.values())
        most = (math.isqrt(_MOST_PAIRS) - max(len(short), free)) // k
        for more in sorted(min(count, most) for count in (_FEW, most) if found is None and most > 0):
            self._release(owners, more, kept, load, short)
            found = self._fill(short, kept, load, group_of)
            if found is not None:
                break
        return found

    def _release(self, owners: list[int], more: int, kept: Holders, load: dict[int, int], short: list[int]) -> None:
        """Release the holders of some ``more`` owners, spread evenly, and append these owners to ``short``."""
        for owner in owners[:: -(-len(owners) // more)]:
            if len(kept[owner]) == self._k:
                for holder in kept[owner]:
                    load[holder] -= 1
                kept[owner] = []
                short.append(owner)

    def _fill(
        self, short: Sequence[int], kept: Holders, load: Mapping[int, int], group_of: Mapping[int, int]
    ) -> Holders | None:
        """Complete ``kept`` to ``k`` holders for each owner in ``short``, and return the holders of all owners.

        Return None if the ranks with capacity, by ``load``, are not enough, or if the problem is too large.
        """
        if not short:
            return kept
        free = [holder for holder, count in load.items() if count < self._k]
        if len(short) * len(free) > _MOST_PAIRS:
            return None
        need = {owner: self._k - len(kept[owner]) for owner in short}
        pairs = [(a, b) for a in short for b in sorted(free) if a != b and b not in kept[a]]
        found = solve_strictly(Request(self._domains, self._costs(pairs, group_of), need, load, kept), self._k)
        return found and {owner: kept[owner] + found.get(owner, []) for owner in kept}


def _in_order(holders: list[int], before: list[int]) -> list[int]:
    """Sort ``holders``: previous ones first, in their previous order, because a restore asks the first holder first."""
    return [rank for rank in before if rank in holders] + sorted(rank for rank in holders if rank not in before)


def find_problems(
    where: Where, groups: Sequence[Sequence[int]], k: int, holders: Holders, incomplete: Collection[int] = ()
) -> list[str]:
    """Return one sentence for each problem.

    There is no problem if each state and its ``k`` copies are in ``k + 1`` failure domains and all ranks hold equally
    many copies.

    Args:
        where: the failure domains of every logical rank.
        groups: data-parallel groups, each in ring order.
        k: number of copies of each rank's state.
        holders: the placement, as returned by :func:`ft.state.placement.assign.place`.
        incomplete: ranks whose peer copies lack the part of the state that is the same on all data-parallel peers;
            such a part is restored from one of these peers.
    """
    shared: dict[tuple[str, str, int], list[int]] = {}
    for owner, (kind, domain, count) in _worst_of_all(holders, where).items():
        if count > 1:
            shared.setdefault((kind, domain, count), []).append(owner)
    sentences = _too_few(holders, k)
    best = _best_k(where, groups, k) if shared else k
    for (kind, domain, count), owners in sorted(shared.items(), key=lambda item: item[1]):
        copies = len(holders[owners[0]])
        what = f"logical rank(s) {spans(owners)}: "
        if count == copies + 1:
            what += f"their state and {_all(copies)} of it are in {kind} {domain}, whose loss ends in a warm restart"
        else:
            what += f"of their state and its {copies} copies {count} are in {kind} {domain}"
        there = len({kinds[kind] for kinds in where.values() if kind in kinds})
        sentences.append(f"{what}; k = {k} asks for {k + 1} failure domains, and workers are in {there} {kind}(s)")
    if shared:
        works = f"--ft-snapshot-peers {best} can be placed" if best else "no number of copies can be placed better"
        sentences[-1] += f" ({works})"
    return sentences + _too_many(holders, k) + _lost_with_their_peers(where, groups, incomplete)


def _all(copies: int) -> str:
    return "the only copy" if copies == 1 else f"all {copies} copies"


def _worst_of_all(holders: Holders, where: Where) -> dict[int, tuple[str, str, int]]:
    """Return :func:`_worst` for every owner with its holders. Equal sets of domains are computed only once."""
    number: dict[tuple[tuple[str, str], ...], int] = {}
    place_of = {rank: number.setdefault(tuple(kinds.items()), len(number)) for rank, kinds in where.items()}
    known: dict[tuple[int, ...], tuple[str, str, int]] = {}
    found = {}
    for owner in sorted(holders):
        ranks = (owner, *holders[owner])
        places = tuple([place_of[rank] for rank in ranks])
        if places not in known:
            known[places] = _worst(ranks, owner, where)
        found[owner] = known[places]
    return found


def _worst(ranks: Sequence[int], owner: int, where: Where) -> tuple[str, str, int]:
    """Return (kind, domain, count) of the failure domain that has most of ``ranks``.

    Among domains with equal counts, a node comes first, then the kinds in the order of ``where[owner]``.
    """
    worst = ("", "", 0)
    for kind in [NODE, *(kind for kind in where[owner] if kind != NODE)]:
        names = [where[rank][kind] for rank in ranks if kind in where[rank]]
        for name in dict.fromkeys(names):
            if names.count(name) > worst[2]:
                worst = (kind, name, names.count(name))
    return worst


def _too_few(holders: Holders, k: int) -> list[str]:
    short = [owner for owner, held in holders.items() if len(held) < k]
    if not short:
        return []
    least = min(len(holders[owner]) for owner in short)
    return [
        f"logical rank(s) {spans(short)}: k = {k} copies need {k} other workers, there are {least} "
        f"(--ft-snapshot-peers {least} can be placed)"
    ]


def _too_many(holders: Holders, k: int) -> list[str]:
    load = Counter(holder for held in holders.values() for holder in held)
    full = [rank for rank, count in load.items() if count > k]
    if not full:
        return []
    most = max(load.values())
    return [
        f"logical rank(s) {spans(full)} hold up to {most} copies, {k} each would be even: failure domains are of "
        "unequal size, and there is no other way to keep copies apart"
    ]


def _best_k(where: Where, groups: Sequence[Sequence[int]], k: int) -> int:
    """Return the largest number of copies below ``k`` for which no domain is shared; 0 if there is none."""
    for fewer in range(k - 1, 0, -1):
        holders = place(where, groups, fewer)
        if all(count <= 1 for _, _, count in _worst_of_all(holders, where).values()):
            return fewer
    return 0


def _lost_with_their_peers(where: Where, groups: Sequence[Sequence[int]], incomplete: Collection[int]) -> list[str]:
    """Return a sentence for each data-parallel group whose ranks all share a failure domain.

    Only groups are named that have a rank in ``incomplete``.
    """
    sentences = []
    for group in groups:
        if not set(group) & set(incomplete):
            continue
        for kind in where[group[0]]:
            names = {where[rank].get(kind) for rank in group}
            if len(names) == 1 and names != {None}:
                sentences.append(
                    f"logical rank(s) {spans(group)}: the part of the state that is the same on all of them is only in "
                    f"{kind} {names.pop()}, and no copy holds it "
                    "(--use-distributed-optimizer makes every copy complete)"
                )
                break
    return sentences
