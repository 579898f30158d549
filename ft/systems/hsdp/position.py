"""Training position of an FT-HSDP replica: the trainer's step counters, and how many samples every replica has taken.

Each replica reads its own stream of samples; an assignment divides the samples of the run among these streams
(:mod:`ft.systems.hsdp.samples`). The position is part of the state that replicas transfer and save.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ft.job.quorum.values import estimated
from ft.protection.position import Position
from ft.systems.hsdp.samples import SampleAssignment

KEY = "replicas"
_OWN = ("lineage", "has_state")


class Follow(Protocol):
    """Interface to the data loaders of this rank, which read the stream of its replica."""

    def __call__(self, assignment: SampleAssignment, position: int) -> None:
        """Make the loaders read the replica's stream of ``assignment`` from ``position`` on."""

    @property
    def position(self) -> int | None:
        """Return the present position of the loaders in the stream, None if this rank reads no samples."""


class ReplicaPosition:
    """The training position, equal on all replicas that have committed the same steps.

    The commit of a step advances the sample positions of the replicas that contributed gradients.

    Args:
        trainer: the trainer's own position.
        extra: returns the mutable mapping that the trainer saves together with its position.
        replica: number of this replica.
        follow: data loaders of this rank.
        assignment: which replica gets which samples.
        positions: replica -> number of samples that it has taken.

    Attributes:
        assignment: which replica gets which samples.
        positions: replica -> number of samples that it has taken.
        lineage: number of the quorum (set of participating replicas) that committed the last step, 0 before the first.
            States with equal step and lineage are equal. Negative if a part of the state was estimated, see
            :func:`ft.job.quorum.values.estimated`.
        has_state: whether the position belongs to a training state, and not to the start of a process that fetches it.
    """

    def __init__(
        self,
        trainer: Position,
        extra: Callable[[], dict[str, Any]],
        replica: int,
        follow: Follow,
        assignment: SampleAssignment,
        positions: dict[int, int],
    ):
        self._trainer, self._extra, self._replica, self._follow = trainer, extra, replica, follow
        self.assignment, self.positions, self.lineage = assignment, dict(positions), 0
        self.has_state = True
        self._note()

    @property
    def step(self) -> int:
        """Return the number of committed steps."""
        return self._trainer.get()["step"]

    @property
    def mine(self) -> int:
        """Return the number of samples that this replica has taken of its own stream."""
        return self.positions.get(self._replica, 0)

    def began_at(self, batch: int) -> int:
        """Return the position in this replica's stream at which the present step began to read its ``batch`` samples.

        On a rank with loaders, the result is computed from what the loaders have really read.
        """
        read_to = self._follow.position
        return self.mine if read_to is None else read_to - batch

    def advance(self, healthy: Sequence[int], batch: int, quorum: int) -> None:
        """Commit a step of the quorum with number ``quorum``: each of ``healthy`` has taken ``batch`` samples."""
        for replica in healthy:
            self.positions[replica] = self.positions.get(replica, 0) + batch
        self.lineage = quorum
        self._note()

    def get(self) -> dict[str, Any]:
        return {**self._trainer.get(), "lineage": self.lineage, "has_state": self.has_state}

    def set(self, position: dict[str, Any]) -> None:
        self._trainer.set({name: value for name, value in position.items() if name not in _OWN})
        self.lineage, self.has_state = position["lineage"], position["has_state"]
        self.follow()

    def without_state(self, position: dict[str, Any]) -> dict[str, Any]:
        """Return ``position`` with the note that it comes without a state, which another replica is to give."""
        return {**position, "lineage": 0, "has_state": False}

    def estimate(self, life: int) -> None:
        """Note that a part of the state was estimated (CheckFree): every exact state of this step goes before it.

        Before the first step, there is nothing that an estimate could save.

        Args:
            life: the life of the replica that begins with this state.
        """
        self.lineage = estimated(self.lineage, self._replica, life)
        self.has_state = self.has_state and self.step > 0

    def follow(self) -> None:
        """Follow the trainer's position, which was set: adopt its extra state, and have the loaders read on there."""
        self.assignment, self.positions = parse(self._extra()[KEY])
        self._follow(self.assignment, self.mine)

    def restart(self, assignment: SampleAssignment, positions: dict[int, int]) -> None:
        """Set the position to that of a checkpoint that was loaded."""
        self.assignment, self.positions, self.lineage = assignment, dict(positions), 0
        self._note()
        self._follow(assignment, self.mine)

    def _note(self) -> None:
        positions = {str(replica): count for replica, count in sorted(self.positions.items())}
        self._extra()[KEY] = {"positions": positions, **self.assignment.as_values()}


def parse(values: dict[str, Any]) -> tuple[SampleAssignment, dict[int, int]]:
    """Return the assignment and the positions that a state holds.

    Raises:
        ValueError: the values do not describe an assignment.
    """
    return SampleAssignment.from_values(values), {int(replica): count for replica, count in values["positions"].items()}
