"""Compute what k peer copies of each snapshot cost and what risk they leave, for one cluster and one model.

A snapshot is a copy of one rank's training state in host memory; other ranks (holders) keep k peer copies of it
(DEADPOOL). A failure domain is a set of nodes that fail together, such as a rack.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ft.lab.plan.snapshot.loss import Failures, Risk, formula_1, risk
from ft.lab.plan.snapshot.shards import Shard
from ft.platform.slurm import NODE
from megatron.ft_trainer.arguments.layout import Layout

MONTH = 30 * 86400.0


@dataclass(frozen=True)
class Question:
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
class Answer:
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
        fits: whether ``transfer_s`` is at most ``Question.window_s``; None where that is unknown.
        formula: probability of losing a state by DEADPOOL, formula (1), per step; where the step time is unknown, per
            ``Failures.window``.
        correlated: the same by DEADPOOL's formula for correlated failures, for the kind of failure domain that fails
            most often; None without failure domains.
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
    formula: float
    correlated: float | None
    risk: Risk
    problems: list[str]

    @property
    def memory(self) -> float:
        return self.own + self.copies


def answer(question: Question, k: int) -> Answer:
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
    formula, correlated = _formulas(question, k)
    return Answer(
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
        formula=formula,
        correlated=correlated,
        risk=risk(where, holders, question.failures),
        problems=find_problems(where, question.groups, k, holders, incomplete),
    )


def _formulas(question: Question, k: int) -> tuple[float, float | None]:
    """Return DEADPOOL's formula (1) and its correlated form, per step, with the cluster's shards and failure rates."""
    per = question.step_s or question.failures.window
    rates = {kind: 1.0 / mtbf for kind, mtbf in question.failures.mtbf.items()}
    node = rates.pop(NODE, 0.0)
    worst = max(rates.values(), default=None)
    count = len(question.shards)
    return formula_1(count, node * per, k), None if worst is None else formula_1(count, worst * per, k)
