"""The probability that a state is lost with all its copies: the paper's formula (1), and failures that are correlated.

Formula (1) (section V-C): nodes fail independently, each within a step with probability p; a shard is lost when its
owner and its k holders fail within the same step; the union bound over D shards is ``D p^(k+1)``. The paper's
correlated form puts q, the probability that a failure domain fails within a step, in the place of p.

Both take it for granted that owner and holders have nothing in common. The model here goes by the placement. Nodes
fail with rate ``1 / mtbf``, and so do failure domains, which take all their nodes along; all of that independently. A
failure opens a window: until the lost ranks are seated again and their copies are sent again, what it took is not
protected. State is lost when everything that is left of an owner and its holders goes down within that window. For a
failure of ``c``, let ``M_c`` be the smallest sets of further components that bring this about for some owner (a domain
that takes several nodes along counts once, and so does a set that several owners are lost by). Then

    P(loss | c) <= min(1, sum over m in M_c of product over f in m of P(f fails within the window))
    P(loss | a failure) = sum over c of rate(c) / rate * P(loss | c)

and over a time T, ``1 - exp(-rate T P(loss | a failure))``. With nodes alone and the k copies on k other nodes the
second line times the rate is ``(k + 1) D p^(k+1)`` per window: k + 1 times formula (1), as any one of the k + 1 may be
the first.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ft.placement.topology import NODE

Where = Mapping[int, Mapping[str, str]]
Component = tuple[str, str]
"""(kind, name) of what can fail: a node, a rack, ..."""


def formula_1(shards: int, p: float, k: int) -> float:
    """Bound on the probability per step that a shard is lost: ``D p^(k+1)``; with q for p its correlated form."""
    return min(1.0, shards * p ** (k + 1))


def over(steps: float, per_step: float) -> float:
    """Probability of at least one loss in so many steps."""
    return 1.0 if per_step >= 1 else -math.expm1(steps * math.log1p(-per_step))


@dataclass(frozen=True)
class Failures:
    """How often what fails.

    Attributes:
        mtbf: kind of component ("node", "rack", ...) -> seconds between two failures of one of them. Kinds that are not
            in it do not fail.
        window: seconds until what a failure took is protected again.
    """

    mtbf: Mapping[str, float]
    window: float

    def within(self, kind: str) -> float:
        """Probability that one component of this kind fails within the window."""
        return -math.expm1(-self.window / self.mtbf[kind]) if kind in self.mtbf else 0.0


@dataclass(frozen=True)
class Risk:
    """``rate``: failures per second of all components together; ``per_failure``: probability that one loses state;
    ``by_kind``: the same for failures of one kind."""

    rate: float
    per_failure: float
    by_kind: Mapping[str, float] = field(default_factory=dict)

    def within(self, seconds: float) -> float:
        """Probability of at least one loss in so long a time."""
        return -math.expm1(-self.rate * seconds * self.per_failure)


def risk(where: Where, holders: Mapping[int, Sequence[int]], failures: Failures) -> Risk:
    """The risk of a placement.

    Args:
        where: logical rank -> kind -> name. holders: owner -> holders of its copies.
    """
    domains_of = {kinds[NODE]: tuple(kinds.items()) for kinds in where.values()}
    sets = {frozenset(where[rank][NODE] for rank in (owner, *held)) for owner, held in holders.items()}
    sets_on: dict[str, set[frozenset[str]]] = {}
    for nodes in sets:
        for node in nodes:
            sets_on.setdefault(node, set()).add(nodes)
    chance = {kind: failures.within(kind) for kinds in where.values() for kind in kinds}
    rates: dict[str, float] = {}
    losses: dict[str, float] = {}
    for kind, members in _components(domains_of):
        if kind not in failures.mtbf:
            continue
        rate = 1.0 / failures.mtbf[kind]
        hit = set().union(*(sets_on[node] for node in members if node in sets_on))
        ways = set().union(*(_ways_down(nodes - members, domains_of, chance) for nodes in hit))
        lost = min(1.0, math.fsum(math.prod(chance[kind] for kind, _ in way) for way in ways))
        rates[kind] = rates.get(kind, 0.0) + rate
        losses[kind] = losses.get(kind, 0.0) + rate * lost
    total = math.fsum(rates.values())
    by_kind = {kind: losses[kind] / rates[kind] for kind in rates}
    return Risk(total, math.fsum(losses.values()) / total if total else 0.0, by_kind)


def _components(domains_of: Mapping[str, tuple[Component, ...]]) -> Iterator[tuple[str, frozenset[str]]]:
    """(kind, nodes that go down with it) of everything that can fail."""
    members: dict[Component, list[str]] = {}
    for node, components in domains_of.items():
        for component in components:
            members.setdefault(component, []).append(node)
    for (kind, _), nodes in members.items():
        yield kind, frozenset(nodes)


def _ways_down(
    nodes: frozenset[str], domains_of: Mapping[str, tuple[Component, ...]], chance: Mapping[str, float]
) -> set[frozenset[Component]]:
    """The smallest sets of components whose failures take all of ``nodes`` down; the empty one where there are none."""
    choices = [[part for part in domains_of[node] if chance[part[0]] > 0] for node in sorted(nodes)]
    ways = {frozenset(choice) for choice in itertools.product(*choices)}
    return {way for way in ways if not any(other < way for other in ways)}
