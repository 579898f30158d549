"""Compute what k peer copies of each snapshot cost and what risk they leave, for one cluster and one model.

The owner of a state is the rank that computes it; its k holders are the ranks that keep a peer copy of it (DEADPOOL). A
failure domain is a set of nodes that fail together, such as a rack. A component is a node or a failure domain.

Each component fails with rate ``1 / mtbf``; a failure domain takes down all its nodes; all failures are independent. A
failure opens a window: the states whose copies it destroyed are less protected until the lost ranks have workers again
and their copies have been sent again. A state is lost when all other nodes that hold it, the owner's and the holders',
go down within that window. For a failure of a component ``c``, let ``M_c`` contain the minimal sets of further
components whose failures cause this for some owner (a domain that takes down several nodes counts once, and so does a
set by which several owners lose their state). Then

    P(loss | c) <= min(1, sum over m in M_c of product over f in m of P(f fails within the window))
    P(loss | a failure) = sum over c of rate(c) / rate * P(loss | c)

and the probability of a loss within a time T is ``1 - exp(-rate T P(loss | a failure))``. If only nodes fail, each with
probability p within a window, and the copies of D states are on k other nodes, the second line times the rate is
``(k + 1) D p^(k+1)`` per window: k + 1 times DEADPOOL's formula (1), because any of the k + 1 nodes may fail first.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ft.lab.plan.snapshot.shards import Shard
from ft.platform.slurm import NODE
from ft.state.placement import Where
from megatron.ft_trainer.arguments.layout import Layout

MONTH = 30 * 86400.0
Component = tuple[str, str]
"""(kind, name) of a component that can fail: a node, a rack, ..."""


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


@dataclass(frozen=True)
class SnapshotQuestion:
    """The planned run.

    Attributes:
        grid: sizes of the parallel groups.
        parameters: number of parameters of the whole model.
        has_flags: whether the trainer's flags are known, not only the model's size.
        where: logical rank -> kind of failure domain ("node", "rack", ...) -> name of the rank's domain of that kind.
        groups: the data-parallel groups, as lists of logical ranks.
        shards: logical rank -> bytes of its snapshot.
        copies_complete: whether a peer copy contains a rank's whole state, and not only the part that its
            data-parallel peers lack.
        host_memory: bytes of a node's host memory, or None.
        pcie: bytes per second between one GPU and its host.
        network: bytes per second of one node, in each direction.
        step_s: seconds of a step, None where unknown.
        optimizer_s: seconds of the optimizer step, during which the training state changes.
        failures: how often each kind of component fails.
    """

    grid: Layout
    parameters: float
    has_flags: bool
    where: Mapping[int, Mapping[str, str]]
    groups: Sequence[Sequence[int]]
    shards: Mapping[int, Shard]
    copies_complete: bool
    host_memory: float | None
    pcie: float
    network: float
    step_s: float | None
    optimizer_s: float
    failures: Failures

    @property
    def nodes(self) -> int:
        """Return the number of nodes."""
        return len({kinds[NODE] for kinds in self.where.values()})

    @property
    def copies_carry(self) -> bool:
        """Return whether peer copies contain any state that data-parallel peers do not hold anyway."""
        return any(shard.owned > 0 for shard in self.shards.values())

    @property
    def window_s(self) -> float | None:
        """Return the seconds from the start of a snapshot to the next optimizer step, None where unknown.

        The copies must be complete within this time.
        """
        return None if self.step_s is None else self.step_s - self.optimizer_s


@dataclass(frozen=True)
class CopiesResult:
    """The result for ``k`` copies. Figures of a node are those of the node with the largest value.

    Attributes:
        k: number of peer copies of each snapshot.
        own: host memory of a node for the snapshots of its own ranks (two buffers each), in bytes.
        copies: host memory of a node for peer copies of other nodes' snapshots (two buffers each), in bytes.
        d2h: bytes that one GPU copies to the host in each step.
        sent: bytes that one node sends in each step.
        received: bytes that one node receives in each step.
        d2h_s: seconds of the copy to the host.
        network_s: seconds of the transfer over the network.
        transfer_s: seconds of both, overlapped chunk by chunk.
        fits: whether ``transfer_s`` is at most ``SnapshotQuestion.window_s``; None where that is unknown.
        risk: risk computed for the actual placement of the copies.
        problems: sentences about the placement's problems.
    """

    k: int
    own: float
    copies: float
    d2h: float
    sent: float
    received: float
    d2h_s: float
    network_s: float
    transfer_s: float
    fits: bool | None
    risk: Risk
    problems: list[str]

    @property
    def memory(self) -> float:
        return self.own + self.copies


def answer(question: SnapshotQuestion, k: int) -> CopiesResult:
    """Place ``k`` copies of each snapshot and compute their cost and risk."""
    # With SciPy, which wrong input need not wait for.
    from ft.state.placement.assign import find_problems, place

    where, shards = question.where, question.shards
    holders = place(where, question.groups, k)
    node = {rank: kinds[NODE] for rank, kinds in where.items()}
    own, copies, sent, received = (dict.fromkeys(node.values(), 0.0) for _ in range(4))
    for owner, held in holders.items():
        shard = shards[owner]
        own[node[owner]] += 2 * (shard.owned + shard.replicated)
        for holder in held:
            copies[node[holder]] += 2 * shard.owned
            if node[holder] != node[owner]:
                sent[node[owner]] += shard.owned
                received[node[holder]] += shard.owned
    fullest = max(own, key=lambda name: own[name] + copies[name])
    d2h = max(shard.owned + shard.replicated for shard in shards.values())
    d2h_s, network_s = d2h / question.pcie, max(*sent.values(), *received.values()) / question.network
    transfer_s = max(d2h_s, network_s)
    incomplete = () if question.copies_complete else list(where)
    return CopiesResult(
        k=k,
        own=own[fullest],
        copies=copies[fullest],
        d2h=d2h,
        sent=max(sent.values()),
        received=max(received.values()),
        d2h_s=d2h_s,
        network_s=network_s,
        transfer_s=transfer_s,
        fits=None if question.window_s is None else transfer_s <= question.window_s,
        risk=risk(where, holders, question.failures),
        problems=find_problems(where, question.groups, k, holders, incomplete),
    )


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
