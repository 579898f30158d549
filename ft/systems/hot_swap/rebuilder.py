"""What hot-swap asks of a system that rebuilds pipeline stages which are lost with all their copies (CheckFree)."""

from typing import Any, Protocol

from ft.job.messages import Neighbours, Repair
from ft.protection.position import Position


class StageRebuilder(Protocol):
    """Rebuilds this rank's part of a lost stage, and helps neighbouring stages to rebuild theirs."""

    def begins(self, step: int) -> None:
        """The run goes on after ``step``."""

    def beside(self, position: Position) -> Position:
        """The trainer's position, together with what the rebuilder has to keep in every snapshot."""

    def committed(self, step: int) -> None:
        """Every rank has finished ``step``."""

    def rebuild(self, step: int, beside: Neighbours) -> tuple[dict[str, Any], dict[str, str]]:
        """Makes this rank's state of ``step`` out of the neighbouring stages'. Collective with :meth:`lend`.

        Returns:
            (the trainer's position, how the state came).

        Raises:
            FallbackError: the neighbours' state cannot be used.
        """

    def lend(self, order: Repair, envelope: dict[str, Any]) -> bool:
        """Gives those that are rebuilt what they need of this rank; whether its own state is still that of the step."""

    def learn(self, order: Repair) -> None:
        """The recovery is done, on every rank; ``order`` says which ranks were rebuilt."""
