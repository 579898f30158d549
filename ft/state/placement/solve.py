"""The assignment of peer copies to holders as an integer program, solved exactly and with equal results on every rank.

``x[o, h]`` is 1 if holder ``h`` keeps a copy for owner ``o``:

    sum over h            x[o, h] = need[o]
    sum over o            x[o, h] + load[h] <= most          copies spread evenly
    sum over h in domain  x[o, h] - shared[o, domain] <= 1   (0 if o is in that domain itself)

The last line applies to every failure domain of every kind, so domains of different kinds may cut across each other
(racks and power feeds). ``need`` is the number of copies to assign for an owner, ``load`` the number of copies that a
holder has already, ``most`` the maximum number of copies of a holder, and ``shared`` the number of copies above the
limit in a domain. scipy's HiGHS solves the program. If the domains are nested, the solution of the linear relaxation is
integral already, and one node of the search tree is enough.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

Domains = frozenset[tuple[str, str]]
"""(kind, name) of every failure domain that a rank is in."""

_SEARCH_NODES = 1000


@dataclass(frozen=True)
class Request:
    """An assignment problem.

    Attributes:
        domains: failure domains of each rank.
        pairs: allowed (owner, holder) pair -> its cost; the sum of the costs is minimised.
        need: number of copies to assign for each owner.
        load: number of copies that each holder has already.
        kept: holders that each owner has already.
    """

    domains: Mapping[int, Domains]
    pairs: Mapping[tuple[int, int], float]
    need: Mapping[int, int]
    load: Mapping[int, int] = field(default_factory=dict)
    kept: Mapping[int, list[int]] = field(default_factory=dict)


def solve_strictly(request: Request, most: int) -> dict[int, list[int]] | None:
    """Return holders of every owner, in different failure domains, such that no holder has more than ``most`` copies.

    Return None if that is impossible.
    """
    strict = {pair: cost for pair, cost in request.pairs.items() if _are_apart(request, *pair)}
    model = _Model(Request(request.domains, strict, request.need, request.load, request.kept))
    if not model.offers_enough():
        return None
    values = model.least(model.costs(), shared=0, most=most)
    return None if values is None else model.chosen(values)


def solve_best(request: Request, share: int) -> dict[int, list[int]] | None:
    """Return the best holders of every owner, also if owner and holders cannot all be in different failure domains.

    The objectives, the most important first, are: fewest shared domains, even load (``share`` copies for each holder),
    lowest cost. Return None if an owner has fewer possible holders than it needs.
    """
    model = _Model(request)
    if not model.offers_enough():
        return None
    values = model.least(model.sharing())
    if values is None:
        return None
    shared = round(float(model.sharing() @ values))
    values = model.least(model.unevenness(share), shared=shared, share=share)
    if values is None:
        return None
    most, excess = model.evenness(values)
    values = model.least(model.costs(), shared=shared, most=most, share=share, excess=excess)
    return None if values is None else model.chosen(values)


def _are_apart(request: Request, owner: int, holder: int) -> bool:
    others = (owner, *request.kept.get(owner, ()))
    return all(request.domains[holder].isdisjoint(request.domains[other]) for other in others)


class _Model:
    """The integer program in matrix form.

    The vector of variables consists of: x for each (owner, holder) pair; shared for each (owner, domain) row; over for
    each holder (the number of its copies above its share); most.
    """

    def __init__(self, request: Request):
        self._request = request
        self.pairs = list(request.pairs)
        self._holders = sorted({holder for _, holder in self.pairs})
        self._rows = self._domain_rows()
        self._count = len(self.pairs)
        self._size = self._count + len(self._rows) + len(self._holders) + 1
        self._needs, self._loads, self._overs, self._sharings = self._matrices()

    def offers_enough(self) -> bool:
        offered = dict.fromkeys(self._request.need, 0)
        for owner, _ in self.pairs:
            offered[owner] += 1
        return all(offered[owner] >= need for owner, need in self._request.need.items())

    def costs(self) -> numpy.ndarray:
        return self._vector(list(self._request.pairs.values()), 0)

    def sharing(self) -> numpy.ndarray:
        return self._vector(numpy.ones(len(self._rows)), self._count)

    def unevenness(self, share: int) -> numpy.ndarray:
        """Return the objective: first the maximum number of copies of a holder, then the copies above the shares."""
        vector = self._vector(numpy.ones(len(self._holders)), self._count + len(self._rows))
        vector[-1] = 1 + sum(self._request.need.values()) + sum(self._request.load.values())
        return vector

    def evenness(self, values: numpy.ndarray) -> tuple[int, int]:
        """Return (maximum number of copies of a holder, number of copies above the shares) of a solution."""
        over = values[self._count + len(self._rows) : -1]
        return round(values[-1]), round(float(over.sum()))

    def least(
        self,
        objective: numpy.ndarray,
        *,
        shared: int | None = None,
        most: int | None = None,
        share: int | None = None,
        excess: int | None = None,
    ) -> numpy.ndarray | None:
        """Return the values of all variables that minimise ``objective``, None if the limits cannot be met.

        Args:
            objective: coefficient of each variable.
            shared: upper limit for the sum of all shared variables; None: no limit.
            most: upper limit for the number of copies of a holder; None: no limit.
            share: number of copies of a holder above which its over variable counts; None: not used.
            excess: upper limit for the sum of all over variables; None: no limit.
        """
        constraints = [self._needs, self._loads, self._sharings]
        upper = numpy.full(self._size, numpy.inf)
        upper[: self._count] = 1
        if share is not None:
            constraints.append(LinearConstraint(self._overs.A, -numpy.inf, self._overs.ub + share))
        if shared == 0:
            upper[self._count : self._count + len(self._rows)] = 0
        elif shared is not None:
            constraints.append(LinearConstraint(self.sharing()[None, :], -numpy.inf, shared))
        if excess is not None:
            over = self._vector(numpy.ones(len(self._holders)), self._count + len(self._rows))
            constraints.append(LinearConstraint(over[None, :], -numpy.inf, excess))
        if most is not None:
            upper[-1] = most
        whole = numpy.zeros(self._size)
        whole[: self._count] = 1
        found = milp(
            objective,
            integrality=whole,
            bounds=Bounds(0, upper),
            constraints=constraints,
            options={"node_limit": _SEARCH_NODES, "mip_rel_gap": 0},
        )
        values: numpy.ndarray | None = found.x
        return values

    def chosen(self, values: numpy.ndarray) -> dict[int, list[int]]:
        holders: dict[int, list[int]] = {owner: [] for owner in self._request.need}
        for index in numpy.flatnonzero(values[: self._count] > 0.5):
            owner, holder = self.pairs[index]
            holders[owner].append(holder)
        return holders

    def _vector(self, values: Sequence[float] | numpy.ndarray, start: int) -> numpy.ndarray:
        vector = numpy.zeros(self._size)
        vector[start : start + len(values)] = values
        return vector

    def _domain_rows(self) -> dict[tuple[int, tuple[str, str]], list[int]]:
        """Return (owner, domain) -> indices of the owner's pairs with holders in the domain.

        Rows whose pairs cannot exceed the limit of the domain are left out.
        """
        request, rows = self._request, dict[tuple[int, tuple[str, str]], list[int]]()
        for index, (owner, holder) in enumerate(self.pairs):
            for domain in request.domains[holder]:
                rows.setdefault((owner, domain), []).append(index)
        return {row: members for row, members in rows.items() if len(members) > self._room(*row)}

    def _room(self, owner: int, domain: tuple[str, str]) -> int:
        """Return the limit (0 or 1) for new copies of ``owner`` in ``domain``: 0 if the owner or a copy is in it."""
        taken = (owner, *self._request.kept.get(owner, ()))
        return 0 if any(domain in self._request.domains[rank] for rank in taken) else 1

    def _matrices(self) -> tuple[LinearConstraint, ...]:
        request, count, rows = self._request, self._count, self._rows
        owner_row = {owner: i for i, owner in enumerate(request.need)}
        holder_row = {holder: i for i, holder in enumerate(self._holders)}
        pair = numpy.arange(count)
        owners = numpy.array([owner_row[owner] for owner, _ in self.pairs], dtype=int)
        holders = numpy.array([holder_row[holder] for _, holder in self.pairs], dtype=int)
        every = numpy.arange(len(self._holders))
        loads = numpy.array([request.load.get(holder, 0) for holder in self._holders], dtype=float)
        need = numpy.array(list(request.need.values()), dtype=float)
        of_row = numpy.array([i for i, members in enumerate(rows.values()) for _ in members], dtype=int)
        in_row = numpy.array([index for members in rows.values() for index in members], dtype=int)
        number = numpy.arange(len(rows))
        room = numpy.array([self._room(*row) for row in rows], dtype=float)
        over = count + len(rows) + every
        return (
            LinearConstraint(self._matrix(len(need), [(1, owners, pair)]), need, need),
            LinearConstraint(
                self._matrix(len(every), [(1, holders, pair), (-1, every, numpy.full(len(every), self._size - 1))]),
                -numpy.inf,
                -loads,
            ),
            LinearConstraint(self._matrix(len(every), [(1, holders, pair), (-1, every, over)]), -numpy.inf, -loads),
            LinearConstraint(
                self._matrix(len(rows), [(1, of_row, in_row), (-1, number, count + number)]), -numpy.inf, room
            ),
        )

    def _matrix(self, height: int, entries: list[tuple[int, numpy.ndarray, numpy.ndarray]]) -> coo_array:
        data = numpy.concatenate([numpy.full(len(rows), float(value)) for value, rows, _ in entries])
        rows = numpy.concatenate([rows for _, rows, _ in entries])
        columns = numpy.concatenate([columns for _, _, columns in entries])
        return coo_array((data, (rows, columns)), shape=(height, self._size)).tocsr()
