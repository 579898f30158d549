"""The interface between hot-swap and a system that rebuilds pipeline stages lost with all their copies (CheckFree)."""

from typing import Any, Protocol

from ft.job.messages import Neighbours, Repair
from ft.protection.position import Position


class StageRebuilder(Protocol):
    """Rebuilds this rank's part of a lost stage, and helps neighbouring stages to rebuild theirs."""

    def begins(self, step: int) -> None:
        """Handle the start of the run after ``step``."""

    def beside(self, position: Position) -> Position:
        """Return the trainer's position, combined with what the rebuilder has to store in every snapshot."""

    def committed(self, step: int) -> None:
        """Handle the end of ``step`` on every rank."""

    def rebuild(self, step: int, beside: Neighbours) -> tuple[dict[str, Any], dict[str, str]]:
        """Rebuild this rank's state of ``step`` from the neighbouring stages. Collective with :meth:`lend`.

        Returns:
            (the trainer's position, description of the sources).

        Raises:
            FallbackError: the neighbours' state cannot be used.
        """

    def lend(self, order: Repair, envelope: dict[str, Any]) -> bool:
        """Send this rank's state to neighbours under rebuild; return whether its own is still that of the step."""

    def learn(self, order: Repair) -> None:
        """Record the end of a recovery, on every rank; ``order`` lists the ranks that were rebuilt."""
