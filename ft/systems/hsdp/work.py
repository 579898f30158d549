"""Division of a step among the replicas: what a replica computes, and how its gradients are weighted."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence

import torch

from ft.job.quorum import Quorum
from ft.systems.hsdp import lr
from ft.systems.hsdp.place import Place

Reduced = Callable[[], None] | None


class Work(ABC):
    """Strategy for dividing a step among the replicas. All of its results are equal on all ranks of a replica.

    Attributes:
        units: number of shards that the slowest replica computes in the attempt under way; its duration is
            proportional.
        pause_s: seconds to wait before another attempt can succeed.
        stack: for the record of the step, see :class:`ft.systems.hsdp.commits.Commit`.
        owners: for the record of the step.
        patch: for the record of the step.
        computed: for the record of the step.
    """

    units: float = 1.0
    pause_s: float = 0.0
    stack: int | None = None
    owners: tuple[int, ...] = ()
    patch: tuple[int, ...] = ()
    computed: Mapping[int, int] | None = None

    @abstractmethod
    def plan(self, quorum: Quorum | None) -> None:
        """Begin an attempt at a step. ``quorum``: None while it is not known; it is then assumed to be like the last
        one.
        """

    @abstractmethod
    def share(self, samples: int) -> int:
        """Return how many samples of a global batch are computed here in this attempt."""

    @abstractmethod
    def problem(self, quorum: Quorum, is_planned: bool) -> str:
        """Return why the attempt cannot end in a commit, "" if it can; called in another thread, on all members alike.

        Args:
            quorum: quorum of the step.
            is_planned: the attempt was planned before ``quorum`` was known.
        """

    @abstractmethod
    def scale(self, quorum: Quorum) -> float:
        """Return the factor of the sum of the replicas' mean gradients."""

    @abstractmethod
    def lr_factor(self, quorum: Quorum) -> float:
        """Return the factor of the learning rate."""

    @abstractmethod
    def streams(self, quorum: Quorum) -> Sequence[int]:
        """Return the replicas (or shard types) whose samples the step takes."""

    @abstractmethod
    def kept(self, place: int, parts: list[torch.Tensor], reduced: Reduced) -> Reduced:
        """Return what is to be called before ``parts`` of bucket group ``place`` are exchanged; None: nothing.

        Args:
            place: index of the bucket group.
            parts: gradients of the group, flat tensors.
            reduced: waits for their reduction inside the replica; None: they are reduced already.
        """

    @abstractmethod
    def add_kept(self, sums: torch.Tensor) -> torch.Tensor:
        """Return [loss sum, tokens] of all that this replica has computed of the step. ``sums``: those of this
        attempt.
        """

    @abstractmethod
    def reduced(self, tokens: torch.Tensor | None) -> None:
        """All gradients of the attempt are reduced inside the replica, exchanged or not, and core is about to use them.

        Args:
            tokens: number of tokens that core divides by, or None; set in place to the number in all that this replica
                has computed of the step.
        """

    @abstractmethod
    def restart(self) -> None:
        """Reset to the state of a checkpoint that was loaded, from which the run goes on."""

    @abstractmethod
    def failed(self) -> None:
        """Handle an attempt that is not committed; all that it has computed is still there."""

    @abstractmethod
    def committed(self, quorum: Quorum) -> None:
        """Handle the commit of the step, after the position was advanced; what this changes is part of the shared
        state.
        """


class OwnStream(Work):
    """FT-HSDP's division: each replica trains its own part; what lost replicas would have trained comes later."""

    def __init__(self, place: Place):
        self._place = place

    def plan(self, quorum: Quorum | None) -> None:
        """Do nothing: the loaders are positioned by the state."""

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
        """Do nothing: nothing is kept."""

    def restart(self) -> None:
        """Do nothing: the position alone determines what is trained."""

    def failed(self) -> None:
        """Do nothing: the whole attempt is discarded."""

    def committed(self, quorum: Quorum) -> None:
        """Do nothing: only the position changes."""
