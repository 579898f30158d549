"""Training without fault tolerance, where the trainer expects a guard."""

from collections.abc import Callable
from typing import Any


class Unguarded:
    """What :class:`ft.worker.guard.Guard` is to a protected run, for one that is not: it adds nothing."""

    def carry_through(self, work: Callable[[], Any]) -> Any:
        """Runs ``work``."""
        return work()

    def committed(self) -> None:
        """A step is done."""

    def at(self, phase: str) -> None:
        """A point where faults could be injected."""
