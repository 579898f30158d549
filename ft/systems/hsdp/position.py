"""Position of a replica: the trainer's position, and the samples that every replica has taken so far."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ft.protection.position import Position
from ft.systems.hsdp.samples import Deal

KEY = "replicas"


class Follow(Protocol):
    """Data loaders of this rank, which read the stream of its replica."""

    def __call__(self, deal: Deal, position: int) -> None:
        """Read that deal's stream from ``position`` on."""

    @property
    def position(self) -> int | None:
        """Present position of the loaders in the stream, None where this rank reads no samples."""


class ReplicaPosition:
    """Position that is part of the state shared by all replicas; a commit advances the positions of those that
    contributed.

    Args:
        trainer: the trainer's own position.
        extra: returns the live mapping that accompanies it in snapshots and checkpoints.
        replica: number of this replica.
        follow: data loaders of this rank.
        deal: which replica gets which samples.
        positions: samples taken, by replica.

    Attributes:
        deal: which replica gets which samples.
        positions: samples taken, by replica.
        lineage: number of the quorum of the last step, 0 before the first.
    """

    def __init__(
        self,
        trainer: Position,
        extra: Callable[[], dict[str, Any]],
        replica: int,
        follow: Follow,
        deal: Deal,
        positions: dict[int, int],
    ):
        self._trainer, self._extra, self._replica, self._follow = trainer, extra, replica, follow
        self.deal, self.positions, self.lineage = deal, dict(positions), 0
        self._note()

    @property
    def step(self) -> int:
        """Number of committed steps."""
        return self._trainer.get()["step"]

    @property
    def mine(self) -> int:
        """Number of samples that this replica has taken of its own stream."""
        return self.positions.get(self._replica, 0)

    def began_at(self, batch: int) -> int:
        """Return the position in this replica's stream at which the step under way began to read its ``batch`` samples.

        Where there are loaders, the result is what they have really read, and not what they are expected to read.
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
        return {**self._trainer.get(), "lineage": self.lineage}

    def set(self, position: dict[str, Any]) -> None:
        self._trainer.set({name: value for name, value in position.items() if name != "lineage"})
        self.lineage = position["lineage"]
        self.deal, self.positions = parse(self._extra()[KEY])
        self._follow(self.deal, self.mine)

    def restart(self, deal: Deal, positions: dict[int, int]) -> None:
        """Set the position to that of a checkpoint that was loaded."""
        self.deal, self.positions, self.lineage = deal, dict(positions), 0
        self._note()
        self._follow(deal, self.mine)

    def _note(self) -> None:
        positions = {str(replica): count for replica, count in sorted(self.positions.items())}
        self._extra()[KEY] = {"positions": positions, **self.deal.as_values()}


def parse(values: dict[str, Any]) -> tuple[Deal, dict[int, int]]:
    """Return the deal and the positions that a state holds.

    Raises:
        ValueError: it holds none.
    """
    return Deal.from_values(values), {int(replica): count for replica, count in values["positions"].items()}
