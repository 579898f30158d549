"""What is emulated, and over how many processes it is spread."""

import os
import random
import resource
from dataclasses import dataclass

from ft.base.errors import UserError
from ft.job.quorum.spread import FAN_OUT, Tree

WARM_UP = 5
"""Quorums at the beginning that do not count: imports, first allocations, all tables still empty."""
_SPARE_DESCRIPTORS = 256
_PER_CONNECTION = 2
"""Both ends of a connection between relays are in one process."""


@dataclass(frozen=True)
class Job:
    """What is emulated.

    Attributes:
        ranks, replicas: logical ranks in all, in equal replicas. node: ranks on one node: they share its connection.
        fan_out: of the tree of relays in each replica. rounds: quorums that count. deaths: replicas whose leader's
            connection breaks on the way, one after the other; each comes back as a new life. seed: of all chance.
    """

    ranks: int
    replicas: int
    node: int = 8
    fan_out: int = FAN_OUT
    rounds: int = 100
    deaths: int = 0
    seed: int = 1

    def check(self) -> "Job":
        """Returns itself.

        Raises:
            UserError: it cannot be emulated.
        """
        for name, value, least in (
            ("--ranks", self.ranks, 1),
            ("--replicas", self.replicas, 1),
            ("--node", self.node, 1),
            ("--fan-out", self.fan_out, 1),
            ("--rounds", self.rounds, 1),
            ("--deaths", self.deaths, 0),
        ):
            if value < least:
                raise UserError(f"{name} {value}", f"give {least} or more")
        if self.ranks % self.replicas:
            raise UserError(
                f"{self.ranks} ranks cannot be shared out to {self.replicas} equal replicas",
                f"give --ranks {self.ranks - self.ranks % self.replicas or self.replicas}",
            )
        if self.deaths and self.replicas < 2:
            raise UserError("--deaths with one replica: nobody is left to be in a quorum", "give 2 replicas or more")
        if self.deaths * _BETWEEN_DEATHS > self.rounds:
            raise UserError(
                f"{self.deaths} deaths in {self.rounds} rounds", f"give {self.deaths * _BETWEEN_DEATHS} rounds or more"
            )
        return self

    @property
    def tree(self) -> Tree:
        """Of the nodes of one replica."""
        return Tree(-(-self.ranks // self.replicas // self.node), self.fan_out)

    @property
    def steps(self) -> int:
        """Quorums in all; they are for the steps 0 to this - 1."""
        return WARM_UP + self.rounds

    def death_steps(self) -> dict[int, int]:
        """Step -> the replica whose leader is lost in it."""
        draw, span = random.Random(self.seed), self.rounds // max(1, self.deaths)
        return {WARM_UP + span * turn + span // 2: draw.randrange(self.replicas) for turn in range(self.deaths)}


_BETWEEN_DEATHS = 8


def processes(job: Job) -> int:
    """Over how many processes the replicas are spread: one for each core, or more for want of descriptors.

    Raises:
        UserError: one replica alone has too many connections for a process.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = _PER_CONNECTION * job.tree.nodes + job.tree.nodes // job.fan_out + 16
    fit = (most - _SPARE_DESCRIPTORS) // needed
    if fit < 1:
        raise UserError(
            f"a replica of {job.tree.nodes} nodes needs {needed} descriptors, a process may have {most}",
            "raise the hard limit (ulimit -Hn), or give more replicas, or more ranks for each --node",
        )
    return min(job.replicas, max(os.cpu_count() or 1, -(-job.replicas // fit)))


def raise_limit() -> None:
    """As many descriptors as this process may have."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
