"""What a replica computes in a step, and what that stands for among the others."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence

import torch

from ft.job.quorum import Quorum
from ft.systems.hsdp import lr
from ft.systems.hsdp.place import Place

Reduced = Callable[[], None] | None


class Work(ABC):
    """A way to divide a step among the replicas. All of it is the same on all ranks of a replica.

    Attributes:
        units: own batches that the slowest replica computes in the attempt under way: how long it may take.
        pause_s: before another attempt is of use.
        stack, owners, patch, computed: of the step for its record, where there are any
            (:class:`ft.systems.hsdp.commits.Commit`).
    """

    units: float = 1.0
    pause_s: float = 0.0
    stack: int | None = None
    owners: tuple[int, ...] = ()
    patch: tuple[int, ...] = ()
    computed: Mapping[int, int] | None = None

    @abstractmethod
    def plan(self, quorum: Quorum | None) -> None:
        """An attempt at a step begins here. ``quorum``: None while it is not known: that of the last step is likely."""

    @abstractmethod
    def share(self, samples: int) -> int:
        """Samples of a global batch that are computed here in this attempt."""

    @abstractmethod
    def problem(self, quorum: Quorum, is_planned: bool) -> str:
        """Why the attempt cannot end in a commit, "" if it can; called in another thread, on all members alike.

        ``is_planned``: it was planned before ``quorum`` was known.
        """

    @abstractmethod
    def scale(self, quorum: Quorum) -> float:
        """What the sum of the replicas' mean gradients is multiplied with."""

    @abstractmethod
    def lr_factor(self, quorum: Quorum) -> float:
        """What the learning rate is multiplied with."""

    @abstractmethod
    def streams(self, quorum: Quorum) -> Sequence[int]:
        """Whose samples the step takes."""

    @abstractmethod
    def kept(self, place: int, parts: list[torch.Tensor], reduced: Reduced) -> Reduced:
        """What is to be called before ``parts`` of bucket group ``place`` are exchanged, None: nothing.

        ``reduced``: what waits for their reduction inside the replica.
        """

    @abstractmethod
    def add_kept(self, sums: torch.Tensor) -> torch.Tensor:
        """[loss sum, tokens] of all that this replica has computed of the step; ``sums``: of this attempt."""

    @abstractmethod
    def reduced(self, tokens: torch.Tensor | None) -> None:
        """All gradients of the attempt are reduced inside the replica, exchanged or not; core goes on with them now.

        ``tokens``: that core divides by; becomes the number of all that this replica has computed of the step.
        """

    @abstractmethod
    def restart(self) -> None:
        """A checkpoint was loaded: the run goes on from it."""

    @abstractmethod
    def failed(self) -> None:
        """The attempt is not committed; all that it has computed is there."""

    @abstractmethod
    def committed(self, quorum: Quorum) -> None:
        """The step is committed, and the position moved; what this changes is part of the state."""


class OwnStream(Work):
    """FT-HSDP's: each replica trains a part of its own, and what lost ones would have trained comes later."""

    def __init__(self, place: Place):
        self._place = place

    def plan(self, quorum: Quorum | None) -> None:
        """Nothing: the loaders stand where the state says."""

    def share(self, samples: int) -> int:
        return samples // self._place.replicas

    def problem(self, quorum: Quorum, is_planned: bool) -> str:
        return ""

    def scale(self, quorum: Quorum) -> float:
        return 1.0 / len(quorum.healthy)

    def lr_factor(self, quorum: Quorum) -> float:
        return lr.factor(len(quorum.healthy), self._place.replicas, self._place.lr_scaling)

    def streams(self, quorum: Quorum) -> Sequence[int]:
        return quorum.healthy

    def kept(self, place: int, parts: list[torch.Tensor], reduced: Reduced) -> Reduced:
        return reduced

    def add_kept(self, sums: torch.Tensor) -> torch.Tensor:
        return sums

    def reduced(self, tokens: torch.Tensor | None) -> None:
        """Nothing is kept."""

    def restart(self) -> None:
        """Nothing but the position says what is trained."""

    def failed(self) -> None:
        """All of the attempt is dropped."""

    def committed(self, quorum: Quorum) -> None:
        """Nothing but the position changes."""
