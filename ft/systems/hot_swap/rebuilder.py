"""The interface between hot-swap and a system that rebuilds pipeline stages lost with all their copies (CheckFree)."""

from typing import Any, Protocol

from ft.job.messages import Neighbours, Repair
from ft.protection.position import Position


class StageRebuilder(Protocol):
    """Rebuilds this rank's part of a lost stage, and helps neighbouring stages to rebuild theirs."""

    def begins(self, step: int) -> None:
        """Prepare for training that continues after the committed step ``step``."""

    def extended(self, position: Position) -> Position:
        """Return the trainer's position, combined with the values that the rebuilder stores in every snapshot."""

    def committed(self, step: int) -> None:
        """Do the work that follows when all ranks have committed ``step``."""

    def rebuild(self, step: int, beside: Neighbours) -> tuple[dict[str, Any], dict[str, str]]:
        """Rebuild this rank's state of ``step`` from the neighbouring stages.

        The neighbours have to call :meth:`lend` at the same time.

        Args:
            step: step of the restored state.
            beside: logical ranks of the previous and the following stage.

        Returns:
            (the trainer's position, description of the sources).

        Raises:
            FallbackError: the neighbours' state cannot be used.
        """

    def lend(self, order: Repair, envelope: dict[str, Any]) -> bool:
        """Send this rank's state to neighbours that are rebuilt. Return whether this rank's state is still that of the
        step.
        """

    def take_weights(self, step: int, peer: int) -> tuple[dict[str, Any], dict[str, str], dict[str, Any]]:
        """Take the weights of ``step`` from the live model of a data-parallel peer, because this rank's state is lost.

        The peer has to call :meth:`lend_weights` at the same time.

        Args:
            step: step of the restored state.
            peer: logical rank of the data-parallel peer.

        Returns:
            (the trainer's position, description of the sources, the peer's envelope).

        Raises:
            FallbackError: the peer's weights cannot be used.
        """

    def lend_weights(self, order: Repair, envelope: dict[str, Any]) -> None:
        """Send this rank's weights to the data-parallel peers that take them.

        They must be the weights of the order's step.
        """

    def learn(self, order: Repair) -> None:
        """Record the end of a recovery. Every rank calls it; ``order`` lists the ranks that were rebuilt."""
