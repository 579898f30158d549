"""Placement of peer copies by rotation: fast, without a search, for runs with many ranks.

All ranks are put into one circular order, and the holders of every rank are the ranks at ``k`` fixed distances after
it. Every rank then holds ``k`` copies.

In that order, the ranks of each failure domain are adjacent, both for small domains (nodes) and for large ones (racks).
If no domain has more than one in ``k + 1`` of the ranks, distances of 1, 2, ... times the largest domain's size put the
``k`` copies and their owner into different domains. This is guaranteed if domains are nested (racks of nodes). If there
are too few nested domains, all of equal size, ``k`` distances that divide the order evenly share as few domains as
possible. For domains that cut across each other (racks and power feeds), several orders and distances are tried, and
possibly none of them works.

All computations are array operations: 80,000 ranks take tenths of a second.
"""

from collections.abc import Iterator, Mapping, Sequence

import numpy

from ft.state.placement.solve import Domains

_STEPS = 64
"""Number of distances above the largest domain's size that are tried, for domains that cut across each other."""
_SAMPLE = 256
"""Number of ranks on which a distance is tested first, before it is tested on all ranks."""


class Rotation:
    """Ranks in a circular order, in which the ranks of a failure domain are adjacent.

    Args:
        ranks: the logical ranks, owners as well as holders.
        domains: failure domains of each rank.
        first: the kind of domain to sort by first; None: the kind with the largest domains.
    """

    def __init__(self, ranks: Sequence[int], domains: Mapping[int, Domains], first: str | None = None):
        self.kinds, columns = _columns(ranks, domains)
        at = 0 if first is None else self.kinds.index(first)
        order = numpy.lexsort(numpy.roll(columns, -at, axis=1).T[::-1])
        self.ranks = numpy.asarray(ranks)[order]
        self._table = columns[order]
        self._count = len(order)
        sizes = [numpy.bincount(column) for column in columns.T]
        self.largest = max(int(size.max()) for size in sizes)
        members = sizes[-1]
        # If all of the smallest domains (nodes) have the same size, distances are multiples of that size: all ranks of
        # a node then have their copies on the same nodes, so that fewer sets of nodes hold a state and all its copies.
        self._unit = int(members[0]) if (members == members[0]).all() else 1

    def distances(self, k: int) -> Iterator[list[int]]:
        """Yield sets of ``k`` distances that are worth trying."""
        most = self._count // (k + 1)
        for step in range(self.largest, min(most, self.largest + _STEPS) + 1):
            yield [step * i for i in range(1, k + 1)]
        units = self._count // self._unit
        if units > k:
            yield [self._unit * (units * i // (k + 1)) for i in range(1, k + 1)]
        yield [self._count * i // (k + 1) for i in range(1, k + 1)]

    def at(self, distances: Sequence[int]) -> numpy.ndarray:
        """Return one row per rank: its position in the order, followed by the positions of its holders.

        Shape [ranks, k + 1].
        """
        places: numpy.ndarray = (numpy.arange(self._count)[:, None] + numpy.array([0, *distances])) % self._count
        return places

    def next_distance(self, places: numpy.ndarray) -> int | None:
        """Return the shortest distance that adds to each row a holder in none of the row's domains, or None."""
        sample = numpy.linspace(0, self._count - 1, min(_SAMPLE, self._count)).astype(int)
        for distance in range(self._unit, self._count, self._unit):
            for rows in (sample, numpy.arange(self._count)):
                beside = self._table[(rows + distance) % self._count]
                if (self._table[places[rows]] == beside[:, None]).any():
                    break
            else:
                return distance
        return None

    def shared(self, places: numpy.ndarray) -> numpy.ndarray:
        """Return for each row the number of ranks that share a domain with another rank of the row.

        The first rank in each domain is not counted. The numbers are summed over all kinds of domains.
        """
        found = numpy.zeros(len(places), dtype=int)
        for column in self._table.T:
            names = numpy.sort(column[places], axis=1)
            found += (names[:, 1:] == names[:, :-1]).sum(axis=1)
        return found

    def holders(self, places: numpy.ndarray) -> dict[int, list[int]]:
        """Convert rows of positions to {owner's logical rank: logical ranks of its holders}."""
        ranks = self.ranks[places].tolist()
        return {row[0]: row[1:] for row in ranks}


def _columns(ranks: Sequence[int], domains: Mapping[int, Domains]) -> tuple[list[str], numpy.ndarray]:
    """Return (kinds of domains, array of domain numbers, shape [ranks, kinds]). Kinds with large domains come first."""
    number: dict[Domains, int] = {}
    place = [number.setdefault(domains[rank], len(number)) for rank in ranks]
    places = [dict(found) for found in number]
    kinds = {kind for found in places for kind in found}
    columns = {}
    for kind in kinds:
        # Ranks without a domain of this kind get a domain of their own, one for each set of domains.
        names = [found.get(kind, (kind, i)) for i, found in enumerate(places)]
        known = {name: i for i, name in enumerate(dict.fromkeys(names))}
        columns[kind] = [known[name] for name in names]
    in_order = sorted(kinds, key=lambda kind: (max(columns[kind]), kind))
    return in_order, numpy.array([columns[kind] for kind in in_order]).T[place]


def rotate(
    ranks: Sequence[int], domains: Mapping[int, Domains], k: int, owners: Sequence[int] | None = None
) -> tuple[dict[int, list[int]], int]:
    """Return (``k`` holders of each owner, number of shared domains) for the best rotation found.

    Args:
        ranks: the possible holders, more than ``k`` logical ranks.
        domains: failure domains of each rank.
        k: number of copies.
        owners: the ranks that need holders, a subset of ``ranks``; default: all ranks.
    """
    best: dict[int, list[int]] = {}
    least = None
    rotation = Rotation(ranks, domains)
    for first in rotation.kinds:
        if first != rotation.kinds[0]:
            rotation = Rotation(ranks, domains, first)
        counted = slice(None) if owners is None else numpy.isin(rotation.ranks, numpy.asarray(owners))
        for distances in rotation.distances(k):
            places = rotation.at(distances)[counted]
            shared = int(rotation.shared(places).sum())
            if least is None or shared < least:
                best, least = rotation.holders(places), shared
            if not shared:
                return best, 0
    return best, least or 0


def rotate_with_peers(
    groups: Sequence[Sequence[int]], domains: Mapping[int, Domains], k: int
) -> dict[int, list[int]] | None:
    """Return ``k`` holders of each rank, all in different domains, with as many data-parallel peers as possible.

    Return None if no such rotation was found, or if it would have no peer among the holders.

    Args:
        groups: data-parallel groups, each in ring order.
        domains: failure domains of each rank.
        k: number of copies of each rank's state.
    """
    ranks = sorted(rank for group in groups for rank in group)
    rotation = Rotation(ranks, domains)
    place_of = {rank: i for i, rank in enumerate(rotation.ranks.tolist())}
    for peers in range(k - 1, 0, -1):
        places = _within_groups(groups, domains, peers, place_of)
        while places is not None and places.shape[1] <= k:
            distance = rotation.next_distance(places)
            if distance is None:
                places = None
            else:
                beyond = (numpy.arange(len(ranks)) + distance) % len(ranks)
                places = numpy.hstack([places, beyond[:, None]])
        if places is not None:
            return rotation.holders(places)
    return None


def _within_groups(
    groups: Sequence[Sequence[int]], domains: Mapping[int, Domains], peers: int, place_of: Mapping[int, int]
) -> numpy.ndarray | None:
    """Return rows of positions: every rank with ``peers`` holders in its group, all in different domains.

    Return None if no such rotation was found for some group. Shape [ranks, peers + 1].
    """
    places = numpy.zeros((len(place_of), peers + 1), dtype=int)
    for group in groups:
        if len(group) <= peers:
            return None
        held, shared = rotate(group, domains, peers)
        if shared:
            return None
        for owner, holders in held.items():
            places[place_of[owner]] = [place_of[rank] for rank in (owner, *holders)]
    return places
