"""Compute the probability that a training state is lost with all its copies, for ``ft plan snapshot``.

The module has two models: DEADPOOL's formula (1), and a model with correlated failures of nodes and racks. The owner of
a state is the rank that computes it; its k holders are the ranks that keep a copy of it in host memory. A failure
domain is a set of nodes that fail together, such as a rack. A component is a node or a failure domain.

Formula (1) (DEADPOOL, section V-C): nodes fail independently, each within a step with probability p. A shard is lost
when its owner and its k holders fail within the same step; the union bound over D shards is ``D p^(k+1)``. DEADPOOL's
correlated form replaces p by q, the probability that a failure domain fails within a step.

Both assume that owner and holders share no failure domain. The model here uses the actual placement. Each component
fails with rate ``1 / mtbf``; a failure domain takes down all its nodes; all failures are independent. A failure opens a
window: the states whose copies it destroyed are less protected until the lost ranks have workers again and their copies
have been sent again. A state is lost when all other nodes that hold it, the owner's and the holders', go down within
that window. For a failure of a component ``c``, let ``M_c`` contain the minimal sets of further components whose
failures cause this for some owner (a domain that takes down several nodes counts once, and so does a set by which
several owners lose their state). Then

    P(loss | c) <= min(1, sum over m in M_c of product over f in m of P(f fails within the window))
    P(loss | a failure) = sum over c of rate(c) / rate * P(loss | c)

and the probability of a loss within a time T is ``1 - exp(-rate T P(loss | a failure))``. If only nodes fail and the k
copies are on k other nodes, the second line times the rate is ``(k + 1) D p^(k+1)`` per window. This is k + 1 times
formula (1), because any of the k + 1 nodes may be the first to fail.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ft.platform.slurm import NODE
from ft.state.placement import Where

Component = tuple[str, str]
"""(kind, name) of a component that can fail: a node, a rack, ..."""


def formula_1(shards: int, p: float, k: int) -> float:
    """Return the bound on the probability per step that a shard is lost: ``D p^(k+1)``; with q for p, its correlated
    form.
    """
    return min(1.0, shards * p ** (k + 1))


@dataclass(frozen=True)
class Failures:
    """How often each kind of component fails.

    Attributes:
        mtbf: kind of component ("node", "rack", ...) -> mean seconds between two failures of one component; kinds that
            are not listed do not fail.
        window: seconds from a failure until all states have all their copies again.
    """

    mtbf: Mapping[str, float]
    window: float

    def within(self, kind: str) -> float:
        """Return the probability that one component of this kind fails within the window."""
        return -math.expm1(-self.window / self.mtbf[kind]) if kind in self.mtbf else 0.0


@dataclass(frozen=True)
class Risk:
    """The risk of losing state.

    Attributes:
        rate: failures per second of all components together.
        per_failure: probability that a failure loses state.
        by_kind: kind of component -> probability that its failure loses state.
    """

    rate: float
    per_failure: float
    by_kind: Mapping[str, float] = field(default_factory=dict)

    def within(self, seconds: float) -> float:
        """Return the probability of at least one loss within ``seconds``."""
        return -math.expm1(-self.rate * seconds * self.per_failure)


def risk(where: Where, holders: Mapping[int, Sequence[int]], failures: Failures) -> Risk:
    """Return the risk of a placement.

    Args:
        where: logical rank -> kind -> name of its failure domains.
        holders: owner -> ranks that hold copies of its state.
        failures: how often each kind of component fails.
    """
    nodes = {kinds[NODE]: kinds for kinds in where.values()}
    number: dict[Component, int] = {}  # small integers make set operations fast
    parts = [[number.setdefault(part, len(number)) for part in kinds.items()] for kinds in nodes.values()]
    kinds = [kind for kind, _ in number]
    chance = [failures.within(kind) for kind in kinds]
    fatal = [[part for part in of_node if chance[part] > 0] for of_node in parts]
    sets_on = _sets_on(where, holders, {name: i for i, name in enumerate(nodes)})
    known: dict[tuple, float] = {}
    rates: dict[str, float] = {}
    losses: dict[str, float] = {}
    for part, members in _components(parts).items():
        kind = kinds[part]
        if kind not in failures.mtbf:
            continue
        rate = 1.0 / failures.mtbf[kind]
        hit = set().union(*(sets_on.get(node, ()) for node in members))
        rests = sorted(sorted(rest) for rest in {nodes - members for nodes in hit})
        shape = _shape(rests, fatal, kinds)
        if shape not in known:
            ways = set().union(*(_ways_down(rest, fatal) for rest in rests))
            known[shape] = min(1.0, math.fsum(math.prod(chance[part] for part in way) for way in ways))
        rates[kind] = rates.get(kind, 0.0) + rate
        losses[kind] = losses.get(kind, 0.0) + rate * known[shape]
    total = math.fsum(rates.values())
    by_kind = {kind: losses[kind] / rates[kind] for kind in rates}
    return Risk(total, math.fsum(losses.values()) / total if total else 0.0, by_kind)


def _sets_on(
    where: Where, holders: Mapping[int, Sequence[int]], node_of: Mapping[str, int]
) -> dict[int, set[frozenset[int]]]:
    """Return node -> the sets of nodes, each including this node, that together hold all copies of some state."""
    seat = {rank: node_of[kinds[NODE]] for rank, kinds in where.items()}
    found: dict[int, set[frozenset[int]]] = {}
    for nodes in {frozenset([seat[owner], *[seat[rank] for rank in held]]) for owner, held in holders.items()}:
        for node in nodes:
            found.setdefault(node, set()).add(nodes)
    return found


def _components(parts: Sequence[Sequence[int]]) -> dict[int, frozenset[int]]:
    """Return component that can fail -> the nodes that its failure takes down."""
    members: dict[int, list[int]] = {}
    for node, of_node in enumerate(parts):
        for part in of_node:
            members.setdefault(part, []).append(node)
    return {part: frozenset(nodes) for part, nodes in members.items()}


def _shape(rests: Sequence[Sequence[int]], fatal: Sequence[Sequence[int]], kinds: Sequence[str]) -> tuple:
    """Return everything that the result of ``_ways_down`` depends on, without the components' names.

    In a regular cluster most failures have the same shape, so the result can be reused.
    """
    names: dict[int, int] = {}
    return tuple(
        tuple([tuple([(names.setdefault(part, len(names)), kinds[part]) for part in fatal[node]]) for node in rest])
        for rest in rests
    )


def _ways_down(nodes: Sequence[int], fatal: Sequence[Sequence[int]]) -> set[frozenset[int]]:
    """Return the minimal sets of components whose failures take down all ``nodes`` (no nodes: only the empty set)."""
    ways = set(map(frozenset, itertools.product(*[fatal[node] for node in nodes])))
    if len(set(map(len, ways))) == 1:
        return ways
    return {way for way in ways if not any(other < way for other in ways)}
