"""Model of FT-HSDP's gradient all-reduce between replicas, for ``ft simulate hsdp-protocol``.

A quorum is the set of replicas that execute a step together. In each step, the ranks with the same index in all members
of the quorum form one ring. The all-reduce starts when all members have joined. If a member dies, a link is cut or a
deadline expires, the all-reduce fails for the members that have not completed it; the members that have completed it
hold the correct sum. Members may therefore see different outcomes (FT-HSDP, section 4.1).
"""

from typing import TYPE_CHECKING

from ft.job.quorum.values import Quorum
from ft.lab.simulate.hsdp_protocol.held import Contribution

if TYPE_CHECKING:
    from ft.lab.simulate.hsdp_protocol.replica import Rank
    from ft.lab.simulate.hsdp_protocol.world import World

_LATENCY_S, _SPREAD_S, _NOTICE_S = (0.002, 0.02), (0.0, 0.03), (0.0005, 0.03)


class Ring:
    """One ring all-reduce.

    Args:
        world: the simulated run.
        quorum: quorum whose members take part.
        index: index of the participating rank within each replica.
    """

    def __init__(self, world: "World", quorum: Quorum, index: int):
        self.world, self.quorum, self.index = world, quorum, index
        self._joined: dict[int, tuple[Rank, Contribution | None]] = {}
        self._through: set[int] = set()
        self._first_gone: int | None = None
        self._is_failed = self._is_running = False

    def join(self, rank: "Rank", contribution: Contribution | None) -> None:
        """Let a rank join; ``contribution`` None: the rank contributes zeros, because its replica is behind."""
        self._joined[rank.replica] = (rank, contribution)
        if self._is_failed:
            self._tell_failure(rank)
            return
        if self.world.habits.gives_up:
            rank.do(self.world.shape.ring_s, self._deadline, rank)
        for replica, life in self.quorum.lives.items():
            if self.world.is_over(replica, life):
                self.world.time.after(self.world.rng.uniform(*_NOTICE_S), self.member_gone, replica)
        if len(self._joined) == len(self.quorum.members) and not self._is_running:
            self._is_running = True
            self.world.time.after(self.world.rng.uniform(*_LATENCY_S), self._turn)

    def member_gone(self, replica: int) -> None:
        """End the ring because a member has closed its connections, by its death or after its deadline."""
        if self._is_failed or len(self._through) == len(self.quorum.members):
            return
        self._is_failed, self._first_gone = True, replica
        for other, (rank, _) in self._joined.items():
            if other not in self._through and other != replica:
                self._tell_failure(rank)

    def _turn(self) -> None:
        """Complete the reduction, or postpone it while a member is paused or a link is cut. All members have joined."""
        if self._is_failed:
            return
        until = max((rank.awake_at for rank, _ in self._joined.values()), default=0.0)
        edges = self._edges()
        until = max(until, max((self.world.cut_until(a, b) for a, b in edges), default=0.0))
        if until > self.world.time.now:
            self.world.time.after(until - self.world.time.now + 1e-6, self._turn)
            return
        for rank, _ in self._joined.values():
            self.world.time.after(self.world.rng.uniform(*_SPREAD_S), self._complete, rank)

    def _complete(self, rank: "Rank") -> None:
        if self._is_failed or not rank.is_alive:
            return
        self._through.add(rank.replica)
        total = tuple(sorted(given for _, given in self._joined.values() if given is not None))
        rank.do(0.0, rank.ring_ended, self.quorum, total, None)
        self.world.at("ring", rank)

    def _deadline(self, rank: "Rank") -> None:
        if self._is_failed or rank.replica in self._through:
            return
        suspect = self._left_of(rank.replica)
        rank.do(0.0, rank.ring_ended, self.quorum, None, suspect)
        self.member_gone(rank.replica)

    def _left_of(self, replica: int) -> int | None:
        """Return the neighbour to suspect of a failure, because it sends or accepts nothing; None if there is none."""
        members = self.quorum.members
        place = members.index(replica)
        left, right = members[place - 1], members[(place + 1) % len(members)]
        if right != replica and (self._is_silent(right) or self.world.is_cut(replica, right)):
            left = right if not self._is_silent(left) and not self.world.is_cut(replica, left) else left
        return left if left != replica else None

    def _is_silent(self, replica: int) -> bool:
        return replica not in self._joined or self._joined[replica][0].awake_at > self.world.time.now

    def _tell_failure(self, rank: "Rank") -> None:
        """Notify a rank that a neighbour has closed its connection.

        The neighbour may have caused the failure, or may have left the ring because of it. Therefore the first member
        that left is named as the suspect only with some probability.
        """
        suspect = self._first_gone if self.world.rng.random() < 0.6 else None
        suspect = suspect if suspect != rank.replica else None
        rank.do(self.world.rng.uniform(*_NOTICE_S), rank.ring_ended, self.quorum, None, suspect)

    def _edges(self) -> list[tuple[int, int]]:
        members = self.quorum.members
        return [(members[i - 1], members[i]) for i in range(len(members)) if members[i - 1] != members[i]]
