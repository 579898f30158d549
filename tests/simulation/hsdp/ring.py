"""Model of FT-HSDP's rings, the connections between replicas for the all-reduce.

A quorum is the set of replicas that execute a step together. The ranks with the same index in all members of a quorum
are connected in a ring, which later quorums of the same members use again. An all-reduce starts when all members have
joined it. If a member dies, a link is cut or a deadline expires, the ring breaks: the all-reduce fails for the members
that have not completed it, and so do all later ones; the members that have completed it hold the sum. Members may
therefore see different outcomes (FT-HSDP, section 4.1).
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from ft.job.quorum.values import Quorum
from ft.systems.hsdp import exchange
from ft.systems.hsdp.exchange import TableComparison
from tests.simulation.hsdp.held import Contribution

if TYPE_CHECKING:
    from tests.simulation.hsdp.rank import Rank
    from tests.simulation.hsdp.world import World

_LATENCY_S, _SPREAD_S, _NOTICE_S = (0.002, 0.02), (0.0, 0.03), (0.0005, 0.03)

_EQUAL = torch.zeros(2, dtype=torch.int64)
"""Digest of the sums, which all members have received."""


def address_row(replica: int, life: int, index: int) -> dict[str, str]:
    """Return the addresses of a rank: that of its ring and that of its state server. Each process has its own."""
    return {"ring": f"ring {replica}.{life}.{index}", "fetch": f"fetch {replica}.{life}.{index}"}


@dataclass
class Operation:
    """One all-reduce.

    Attributes:
        joined: replica -> (its rank, its attempt at a step, its contribution; None: zeros).
        wrong: replicas whose model was changed.
        through: replicas that have completed it.
    """

    joined: "dict[int, tuple[Rank, int, Contribution | None]]" = field(default_factory=dict)
    wrong: set[int] = field(default_factory=set)
    through: set[int] = field(default_factory=set)


class Ring:
    """The connections of the ranks with one index in the members of a quorum.

    Args:
        world: the simulated run.
        quorum: quorum for which the ring was connected.
        index: index of the participating rank within each replica.
    """

    def __init__(self, world: "World", quorum: Quorum, index: int):
        self.world, self.quorum, self.index = world, quorum, index
        self._operations: list[Operation] = []
        self._calls = dict.fromkeys(quorum.members, 0)
        self._first_gone: int | None = None
        self._is_broken = False

    def all_reduce(self, rank: "Rank", contribution: Contribution | None, limit_s: float) -> None:
        """Let a rank join its next all-reduce; ``contribution`` None: zeros, because its replica is behind."""
        call = self._calls[rank.replica]
        self._calls[rank.replica] += 1
        if call == len(self._operations):
            self._operations.append(Operation())
        operation = self._operations[call]
        operation.joined[rank.replica] = (rank, rank.attempt, contribution)
        operation.wrong |= {rank.replica} if rank.is_wrong else set()
        if self._is_broken:
            self._tell_failure(operation, rank.replica)
            return
        rank.do(limit_s, self._deadline, operation, rank)
        for replica, life in self.quorum.lives.items():
            if self.world.is_over(replica, life):
                self.leaves(replica)
        if len(operation.joined) == len(self.quorum.members):
            self.world.time.after(self.world.rng.uniform(*_LATENCY_S), self._turn, operation)

    def leaves(self, replica: int) -> None:
        """Let the other members notice, shortly, that a member has closed its connections."""
        self.world.time.after(self.world.rng.uniform(*_NOTICE_S), self.member_gone, replica)

    def member_gone(self, replica: int) -> None:
        """Break the ring because a member has closed its connections, by its death or after its deadline."""
        if self._is_broken:
            return
        self._is_broken, self._first_gone = True, replica
        for operation in self._operations[-1:]:
            for other in operation.joined:
                if other not in operation.through and other != replica:
                    self._tell_failure(operation, other)

    def _turn(self, operation: Operation) -> None:
        """Complete an all-reduce, or postpone it while a member is paused or a link is cut."""
        if self._is_broken:
            return
        until = max(rank.awake_at for rank, _, _ in operation.joined.values())
        until = max(until, max((self.world.cut_until(a, b) for a, b in self._edges()), default=0.0))
        if until > self.world.time.now:
            self.world.time.after(until - self.world.time.now + 1e-6, self._turn, operation)
            return
        for replica in operation.joined:
            self.world.time.after(self.world.rng.uniform(*_SPREAD_S), self._complete, operation, replica)

    def _complete(self, operation: Operation, replica: int) -> None:
        rank, attempt, _ = operation.joined[replica]
        if self._is_broken or not rank.is_alive:
            return
        operation.through.add(replica)
        found = self._compared(operation, replica)
        if found.problem:
            rank.do(0.0, rank.models_differ, attempt, found)
            return
        total = tuple(sorted(given for _, _, given in operation.joined.values() if given is not None))
        rank.do(0.0, rank.ring_ended, attempt, total, None)
        self.world.at("ring", rank)

    def _compared(self, operation: Operation, replica: int) -> TableComparison:
        """Return what a member learns of the others' models, by the production code."""
        if not operation.wrong:
            return TableComparison()
        members, rows = self.quorum.members, []
        for at, each in enumerate(members):
            model = torch.tensor([1 + each if each in operation.wrong else 0, 0])
            has_computed = operation.joined[each][2] is not None
            rows.append(exchange.table(len(members), at, model if has_computed else None, _EQUAL))
        return exchange.compare(torch.stack(rows).sum(dim=0), members.index(replica))

    def _deadline(self, operation: Operation, rank: "Rank") -> None:
        if self._is_broken or rank.replica in operation.through:
            return
        rank.do(0.0, rank.ring_ended, operation.joined[rank.replica][1], None, self._left_of(operation, rank.replica))
        self.member_gone(rank.replica)

    def _left_of(self, operation: Operation, replica: int) -> int | None:
        """Return the neighbour to suspect of a failure, because it sends or accepts nothing; None if there is none."""
        members = self.quorum.members
        place = members.index(replica)
        left, right = members[place - 1], members[(place + 1) % len(members)]
        if right != replica and (self._is_silent(operation, right) or self.world.is_cut(replica, right)):
            left = right if not self._is_silent(operation, left) and not self.world.is_cut(replica, left) else left
        return left if left != replica else None

    def _is_silent(self, operation: Operation, replica: int) -> bool:
        return replica not in operation.joined or operation.joined[replica][0].awake_at > self.world.time.now

    def _tell_failure(self, operation: Operation, replica: int) -> None:
        """Notify a rank that a neighbour has closed its connection.

        The neighbour may have caused the failure, or may have left the ring because of it. Therefore the first member
        that left is named as the suspect only with some probability.
        """
        rank, attempt, _ = operation.joined[replica]
        suspect = self._first_gone if self.world.rng.random() < 0.6 else None
        suspect = suspect if suspect != replica else None
        rank.do(self.world.rng.uniform(*_NOTICE_S), rank.ring_ended, attempt, None, suspect)

    def _edges(self) -> list[tuple[int, int]]:
        members = self.quorum.members
        return [(members[i - 1], members[i]) for i in range(len(members)) if members[i - 1] != members[i]]
