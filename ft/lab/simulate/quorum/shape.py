"""Parameters of the emulation of ``ft simulate quorum``, and the number of processes for its replicas.

A quorum is the set of FT-HSDP's replicas that execute a training step together. The leader of a replica (rank 0) gets
the quorum from the quorum server; a tree of relays, the inner ranks of the tree of the trainer, passes the quorum on
to the replica's ranks.
"""

import os
import random
import resource
from dataclasses import dataclass

from ft.base.errors import UserError
from ft.state.groups.tree import FAN_OUT, Shape

WARM_UP = 5
"""Number of first quorums that are not counted, because they include imports, first allocations and empty tables."""
_SPARE_DESCRIPTORS = 256
"""File descriptors of a process that are kept for other purposes than relays."""
_PER_CONNECTION = 2
"""File descriptors per connection between relays, because both ends are in one process."""


@dataclass(frozen=True)
class Job:
    """Parameters of the emulation.

    Attributes:
        ranks: number of logical ranks of all replicas together.
        replicas: number of replicas, all of the same size.
        node: number of ranks that a relay serves; they share its connection. In the tree of the trainer it is the
            fan-out.
        fan_out: fan-out of the tree of relays in each replica.
        rounds: number of quorums that are counted.
        deaths: number of times that a leader's connection breaks during the run; each time, the replica returns
            restarted and without state.
        seed: seed of all randomness.
    """

    ranks: int
    replicas: int
    node: int = FAN_OUT
    fan_out: int = FAN_OUT
    rounds: int = 100
    deaths: int = 0
    seed: int = 1

    def check(self) -> "Job":
        """Validate the parameters and return this object.

        Raises:
            UserError: a parameter is out of range, or two parameters contradict each other.
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
                f"{self.ranks} ranks cannot be divided into {self.replicas} equal replicas",
                f"give --ranks {self.ranks - self.ranks % self.replicas or self.replicas}",
            )
        if self.deaths and self.replicas < 2:
            raise UserError("--deaths with one replica leaves no replica for a quorum", "give 2 replicas or more")
        if self.deaths * _BETWEEN_DEATHS > self.rounds:
            raise UserError(
                f"{self.deaths} deaths in {self.rounds} rounds", f"give {self.deaths * _BETWEEN_DEATHS} rounds or more"
            )
        return self

    @property
    def tree(self) -> Shape:
        """Return the tree of the relays of one replica."""
        return Shape(-(-self.ranks // self.replicas // self.node), self.fan_out)

    @property
    def steps(self) -> int:
        """Return the number of training steps, warm-up included. There is one quorum for each of the steps 0 to
        ``steps`` - 1.
        """
        return WARM_UP + self.rounds

    def death_steps(self) -> dict[int, int]:
        """Return step -> replica whose leader is lost in that step."""
        draw, span = random.Random(self.seed), self.rounds // max(1, self.deaths)
        return {WARM_UP + span * turn + span // 2: draw.randrange(self.replicas) for turn in range(self.deaths)}


_BETWEEN_DEATHS = 8


def processes(job: Job) -> int:
    """Return the number of processes for the replicas: one per core, or more if file descriptors are scarce.

    Raises:
        UserError: a single replica has more connections than one process may open.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = _PER_CONNECTION * job.tree.size + job.tree.size // job.fan_out + 16
    fit = (most - _SPARE_DESCRIPTORS) // needed
    if fit < 1:
        raise UserError(
            f"a replica of {job.tree.size} nodes needs {needed} descriptors, a process may have {most}",
            "raise the hard limit (ulimit -Hn), or give more replicas, or more ranks for each --node",
        )
    return min(job.replicas, max(os.cpu_count() or 1, -(-job.replicas // fit)))


def raise_limit() -> None:
    """Raise this process's limit of open file descriptors to the hard limit."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
