"""Division of a step among the replicas of an FT-HSDP run: what a replica computes, and how its gradients are weighted.

A step is done by a quorum, the replicas that take part in it; its healthy members contribute gradients. If the gradient
exchange fails, the step is repeated in another quorum; each trial is an attempt. :class:`OwnStream` is the division of
FT-HSDP; SPARe has its own (:mod:`ft.systems.spare.layer`). "Core" is megatron-core.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence

import torch

from ft.job.quorum import Quorum
from ft.systems.hsdp import lr
from ft.systems.hsdp.place import ReplicaContext

Reduced = Callable[[], None] | None
"""A function that returns when the gradients of a bucket group are ready to be exchanged; None: they are ready."""


class Work(ABC):
    """Strategy for dividing a step among the replicas. All of its results are equal on all ranks of a replica.

    Attributes:
        units: amount of work of the slowest replica in this attempt, in shards of the global batch; the duration of the
            attempt is proportional to it.
        is_apart: whether the gradients of the present pass (forward and backward) are only kept by this object, and the
            attempt goes on with another pass. The gradients of the last pass are exchanged.
        stack: SPARe's S, for the commit log (:class:`ft.systems.hsdp.commits.Commit`); None without SPARe.
        owners: the replica that has computed each shard type, for the commit log; empty without SPARe.
        patch: shard types that replicas have computed in addition to their first S, because others were lost, for the
            commit log; empty without SPARe.
        covered: shard types of replicas that were lost in the step, which another one had computed among its first S,
            for the commit log; empty without SPARe.
        adopted: shard types in ``patch`` of which no host was present, for the commit log; empty without SPARe.
        computed: shard type -> position of the samples that this replica has computed of it, for the commit log; None
            without SPARe.
    """

    units: float = 1.0
    is_apart: bool = False
    stack: int | None = None
    owners: tuple[int, ...] = ()
    patch: tuple[int, ...] = ()
    covered: tuple[int, ...] = ()
    adopted: tuple[int, ...] = ()
    computed: Mapping[int, int] | None = None

    @abstractmethod
    def plan(self, quorum: Quorum | None) -> None:
        """Begin an attempt at a step and decide what this replica computes in it.

        Args:
            quorum: quorum of the step; None while it is not known: the healthy members are then assumed to be those of
                the last committed step.
        """

    def next_pass(self) -> None:
        """Begin the next pass of the attempt. Called only if the present one ``is_apart``."""
        raise RuntimeError("the attempt has no other pass")

    @abstractmethod
    def again(self) -> None:
        """Begin the present pass again, because its gradients were wrong.

        The data loaders read this replica's own stream from the beginning of the step; another stream has to be set.
        """

    @abstractmethod
    def share(self, samples: int) -> int:
        """Return how many of the ``samples`` of a global batch this replica computes in the present pass."""

    @abstractmethod
    def problem(self, quorum: Quorum, is_planned: bool) -> str:
        """Return why the attempt cannot end in a commit, "" if it can.

        Called on the thread that agrees on the quorum; the result is the same on all members.

        Args:
            quorum: quorum of the step.
            is_planned: whether the attempt was planned before ``quorum`` was known.
        """

    @abstractmethod
    def scale(self, quorum: Quorum) -> float:
        """Return the factor by which the sum of the replicas' gradients is multiplied."""

    @abstractmethod
    def lr_factor(self, quorum: Quorum) -> float:
        """Return the factor by which the scheduled learning rate is multiplied in this step."""

    @abstractmethod
    def streams(self, quorum: Quorum) -> Sequence[int]:
        """Return the numbers of the sample streams that the step trains: replicas, or with SPARe shard types."""

    @abstractmethod
    def kept(self, place: int, parts: list[torch.Tensor], reduced: Reduced) -> Reduced:
        """Return the function to call before the gradients of a bucket group are exchanged; None: none is needed.

        The function may add gradients that were kept from earlier attempts to ``parts``.

        Args:
            place: index of the bucket group.
            parts: gradients of the group, flat tensors.
            reduced: waits until ``parts`` are reduced inside the replica; None: they are reduced already.
        """

    @abstractmethod
    def add_kept(self, sums: torch.Tensor) -> torch.Tensor:
        """Return [loss sum, tokens] of everything that this replica adds to the step, of this pass and of earlier ones.

        Args:
            sums: [loss sum, tokens] of this pass.
        """

    @abstractmethod
    def reduced(self, tokens: torch.Tensor | None) -> None:
        """Complete the gradients of the pass, exchanged or not, before core uses them.

        Called when all gradients are reduced inside the replica.

        Args:
            tokens: number of tokens by which core divides the gradients, or None if core does not. It is set in place
                to the number of tokens of everything that this replica adds to the step.
        """

    @abstractmethod
    def restart(self) -> None:
        """Reset to the initial state after a checkpoint was loaded from which the run continues."""

    @abstractmethod
    def failed(self) -> None:
        """Process the failure of an attempt; the gradients that the attempt has computed are still in memory."""

    @abstractmethod
    def committed(self, quorum: Quorum) -> None:
        """Process the commit of the step, after the sample positions were advanced.

        The state that this method changes is part of the state that all replicas share.
        """


class OwnStream(Work):
    """FT-HSDP's division: each replica trains the samples of its own stream.

    Samples of absent replicas are not trained in the step; those replicas train them after their return.
    """

    def __init__(self, place: ReplicaContext):
        self._place = place

    def plan(self, quorum: Quorum | None) -> None:
        """Do nothing: restoring the state already positions the data loaders."""

    def again(self) -> None:
        """Do nothing: the data loaders already read the stream again."""

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
        """Do nothing: no gradients are kept from earlier attempts."""

    def restart(self) -> None:
        """Do nothing: the position alone determines what is trained."""

    def failed(self) -> None:
        """Do nothing: the whole attempt is discarded."""

    def committed(self, quorum: Quorum) -> None:
        """Do nothing: only the position changes."""
