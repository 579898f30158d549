"""Division of a step among the replicas of an FT-HSDP run: what a replica computes, and how its gradients are weighted.

A step is done by a quorum, the replicas that take part in it; its healthy members contribute gradients. If the gradient
exchange fails, the step is repeated in another quorum; each trial is an attempt. In steps in which not all replicas
contributed gradients, the learning rate is scaled (FT-HSDP, section 6.2). "Core" is megatron-core.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ft.job.quorum import Quorum
from ft.systems.hsdp.place import DEFAULT, LINEAR, NONE, ReplicaContext


def factor(healthy: int, total: int, mode: str = DEFAULT) -> float:
    """Return the factor of the scheduled learning rate when ``healthy`` of ``total`` replicas contributed gradients."""
    if mode == NONE:
        return 1.0
    return healthy / total if mode == LINEAR else math.sqrt(healthy / total)


@contextmanager
def scaled(param_groups: Sequence[dict[str, Any]], by: float) -> Iterator[None]:
    """Multiply the ``lr`` of every parameter group by ``by`` inside the context, and restore the original objects.

    The scheduler, which sets or reads the rates between steps, is therefore not affected. A factor of 1 changes
    nothing. Groups without ``lr`` are left alone; a group that occurs twice is scaled once.
    """
    if by == 1.0:
        yield
        return
    kept = {id(group): (group, group["lr"]) for group in param_groups if "lr" in group}
    try:
        for group, lr in kept.values():
            group["lr"] = lr * by
        yield
    finally:
        for group, lr in kept.values():
            group["lr"] = lr


Reduced = Callable[[], None] | None
"""A function that returns when the gradients of a bucket group are ready to be exchanged; None: they are ready."""


class Work:
    """Division of a step among the replicas. All of its results are equal on all ranks of a replica.

    This is FT-HSDP's division: each replica trains the samples of its own stream, nothing is kept of a failed attempt,
    and the position alone determines what is trained. Samples of absent replicas are not trained in the step; those
    replicas train them after their return. SPARe overrides it (:class:`ft.systems.spare.layer.StackedWork`).

    Attributes:
        units: amount of work of the slowest replica in this attempt, in shards of the global batch; the duration of the
            attempt is proportional to it.
        is_apart: whether the gradients of the present pass (forward and backward) are only kept by this object, and the
            attempt goes on with another pass. The gradients of the last pass are exchanged.
        adopted: shard types that replicas have computed in addition because no host of them was present; empty without
            SPARe.
    """

    units: float = 1.0
    is_apart: bool = False
    adopted: tuple[int, ...] = ()

    def __init__(self, place: ReplicaContext):
        self._place = place

    def plan(self, quorum: Quorum | None) -> None:
        """Begin an attempt at a step and decide what this replica computes in it.

        Args:
            quorum: quorum of the step; None while it is not known: the healthy members are then assumed to be those of
                the last committed step.
        """

    def next_pass(self) -> None:
        """Begin the next pass of the attempt. Called only if the present one ``is_apart``."""
        raise RuntimeError("the attempt has no other pass")

    def again(self) -> None:
        """Begin the present pass again, because its gradients were wrong.

        The data loaders read this replica's own stream from the beginning of the step; another stream has to be set.
        """

    def share(self, samples: int) -> int:
        """Return how many of the ``samples`` of a global batch this replica computes in the present pass."""
        return samples // self._place.replicas

    def problem(self, quorum: Quorum, is_planned: bool) -> str:
        """Return why the attempt cannot end in a commit, "" if it can.

        Called on the thread that agrees on the quorum; the result is the same on all members.

        Args:
            is_planned: whether the attempt was planned before ``quorum`` was known.
        """
        return ""

    def scale(self, quorum: Quorum) -> float:
        """Return the factor by which the sum of the replicas' gradients is multiplied."""
        return 1.0 / len(quorum.healthy)

    def lr_factor(self, quorum: Quorum) -> float:
        """Return the factor by which the scheduled learning rate is multiplied in this step."""
        return factor(len(quorum.healthy), self._place.replicas, self._place.lr_scaling)

    def streams(self, quorum: Quorum) -> Sequence[int]:
        """Return the numbers of the sample streams that the step trains: replicas, or with SPARe shard types."""
        return quorum.healthy

    def kept(self, place: int, parts: list[torch.Tensor], reduced: Reduced) -> Reduced:
        """Return the function to call before the gradients of a bucket group are exchanged; None: none is needed.

        The function may add gradients that were kept from earlier attempts to ``parts``.

        Args:
            reduced: waits until ``parts`` are reduced inside the replica; None: they are reduced already.
        """
        return reduced

    def add_kept(self, sums: torch.Tensor) -> torch.Tensor:
        """Return [loss sum, tokens] of what this replica adds to the step: this pass (``sums``) and earlier ones."""
        return sums

    def reduced(self, tokens: torch.Tensor | None) -> None:
        """Complete the gradients of the pass, exchanged or not, before core uses them.

        Called when all gradients are reduced inside the replica.

        Args:
            tokens: number of tokens by which core divides the gradients, or None if core does not. It is set in place
                to the number of tokens of everything that this replica adds to the step.
        """

    def record(self) -> dict[str, Any]:
        """Return how the committed step was divided, as fields of :class:`ft.systems.hsdp.commits.Commit` (SPARe)."""
        return {}

    def restart(self) -> None:
        """Reset to the initial state after a checkpoint was loaded from which the run continues."""

    def failed(self) -> None:
        """Process the failure of an attempt; the gradients that the attempt has computed are still in memory."""

    def committed(self, quorum: Quorum) -> None:
        """Process the commit of the step, after the sample positions were advanced.

        The state that this method changes is part of the state that all replicas share.
        """
