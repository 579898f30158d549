"""Training without fault tolerance, where the trainer expects a guard."""

from collections.abc import Callable
from typing import Any

import torch


class Whole:
    """What a guard says to the trainer where there are no replicas: every step is computed here, and all of it."""

    def begins(self) -> bool:
        """A step begins; whether it is computed here, or its outcome taken over from other replicas."""
        return True

    def share(self, samples: int) -> int:
        """What of ``samples`` is computed here."""
        return samples

    def over_replicas(self, reported: list[torch.Tensor]) -> list[torch.Tensor]:
        """Sums of losses and tokens over all replicas."""
        return reported

    def saves(self, step: int, *, is_due: bool, ends: bool) -> bool:
        """Whether the checkpoint of ``step`` is written here."""
        return is_due


class Unprotected(Whole):
    """Training that nothing protects: every question of the trainer has its plain answer."""

    def run_with_recovery(self, work: Callable[[], Any]) -> Any:
        """Runs ``work``."""
        return work()

    def committed(self) -> None:
        """A step is done."""

    def at(self, phase: str) -> None:
        """A point where faults could be injected."""
