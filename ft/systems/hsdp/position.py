"""Where a replica stands: the trainer's position, and the samples that every replica has taken so far."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ft.protection.position import Position
from ft.systems.hsdp.samples import Deal

KEY = "replicas"


class Follow(Protocol):
    """This rank's loaders, of its replica's stream."""

    def __call__(self, deal: Deal, position: int) -> None:
        """They read that deal's stream from ``position`` on."""

    @property
    def position(self) -> int | None:
        """Where they stand, None where this rank reads no samples."""


class ReplicaPosition:
    """Part of the state that all replicas share: committing a step moves the samples of those that contributed to it.

    Args:
        trainer: the trainer's own position. extra: what goes with it into snapshots and checkpoints, the live mapping.
        replica: this one. follow: this rank's loaders.

    Attributes:
        deal: who gets which samples. positions: samples taken, by replica. lineage: quorum of the last step, 0 before
            the first.
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
        """Committed steps."""
        return self._trainer.get()["step"]

    @property
    def mine(self) -> int:
        """Samples of its own stream that this replica has taken."""
        return self.positions.get(self._replica, 0)

    def began_at(self, batch: int) -> int:
        """Where in its stream the step under way began to read its ``batch`` samples: by the loaders, where there are
        any, and not by what is expected of them."""
        read_to = self._follow.position
        return self.mine if read_to is None else read_to - batch

    def advance(self, healthy: Sequence[int], batch: int, quorum: int) -> None:
        """A step is committed in ``quorum``: each of ``healthy`` has taken ``batch`` samples."""
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
        """A checkpoint was loaded: the run goes on from it."""
        self.deal, self.positions, self.lineage = deal, dict(positions), 0
        self._note()
        self._follow(deal, self.mine)

    def _note(self) -> None:
        positions = {str(replica): count for replica, count in sorted(self.positions.items())}
        self._extra()[KEY] = {"positions": positions, **self.deal.as_values()}


def parse(values: dict[str, Any]) -> tuple[Deal, dict[int, int]]:
    """The deal and the positions that a state holds.

    Raises:
        ValueError: it holds none.
    """
    return Deal.from_values(values), {int(replica): count for replica, count in values["positions"].items()}
