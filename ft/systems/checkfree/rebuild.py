"""Compute the parameters of a lost pipeline stage from those of its neighbours, and its learning rate (CheckFree,
section 4.2).

The stage is rebuilt transformer block by transformer block: W_s = (w_{s-1} W_{s-1} + w_{s+1} W_{s+1}) / (w_{s-1} +
w_{s+1}), where the weight w of each neighbour is its last gradient norm: raw (before clipping), not squared. The first
and the last stage have only one neighbour and become a copy of it. This costs little only if the two stages were
trained in each other's position (CheckFree+; CheckFree, section 4.3). Embedding and output layer are not rebuilt here:
with CheckFree+ another stage has a replica of each. The learning rate of a rebuilt stage is raised, so that the stage
diverges from its neighbours.
"""

import math
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ft.base.errors import FallbackError, UserError

BOOST = 1.1
"""Factor of the learning rate (CheckFree, section 4.2); the code of its authors has 1.2 for its 500M model."""


@dataclass(frozen=True)
class Boost:
    """The increase of the learning rate and its duration.

    Attributes:
        decay_steps: number of steps over which the factor falls linearly to 1; with 0 the factor stays the same, as in
            CheckFree, section 4.2.
    """

    factor: float = BOOST
    decay_steps: int = 0

    def at(self, step: int, rebuilt_at: int | None) -> float:
        """Return the factor of a stage's learning rate in ``step``.

        The factor depends on the last rebuild alone, so that the factors of repeated failures are not multiplied.

        Args:
            step: number of the step.
            rebuilt_at: the stage was last rebuilt before this step; None if it was never rebuilt.
        """
        if rebuilt_at is None or step < rebuilt_at:
            return 1.0
        if not self.decay_steps:
            return self.factor
        left = max(0.0, 1.0 - (step - rebuilt_at) / self.decay_steps)
        return 1.0 + (self.factor - 1.0) * left


def scale(groups: Iterable[MutableMapping[str, Any]], max_lr: float, min_lr: float, factor: float) -> None:
    """Set the rates that megatron-core's scheduler reads at every step to ``factor`` times those of the schedule."""
    for group in groups:
        group["max_lr"], group["min_lr"] = max_lr * factor, min_lr * factor


WEIGHTED, UNIFORM, COPY = STRATEGIES = ("weighted", "uniform", "copy")
LEAST_WEIGHT = 1e-4
"""Added to each norm, as in the code of CheckFree's authors, so that two norms of zero give a uniform average."""

LEFT_TO_TRY = "use a peer copy of the stage (--ft-hot-swap) or the last persistent checkpoint (--load)"

Block = Mapping[str, torch.Tensor]
"""The parameters of a transformer block by their names within the block."""


@dataclass(frozen=True)
class Rebuilt:
    """A rebuilt stage.

    Attributes:
        blocks: parameters by name of each block, in the order of the stage; they share no memory with the neighbours.
        strategy: one of :data:`STRATEGIES`.
        shares: shares of the previous and of the following stage in the average, which add up to 1.
        note: a remark for the report, or "".
    """

    blocks: list[dict[str, torch.Tensor]]
    strategy: str
    shares: tuple[float, float]
    note: str = ""


def rebuild(
    previous: Sequence[Block] | None,
    following: Sequence[Block] | None,
    weight_previous: float | None,
    weight_following: float | None,
    strategy: str = WEIGHTED,
) -> Rebuilt:
    """Return the blocks of the stage between ``previous`` and ``following``.

    Averages are computed in float32 (float64 for float64 parameters) and rounded once to the parameter's own dtype.
    Tensors that are not floating-point are taken from the previous stage.

    Args:
        previous: blocks of the previous stage, as many as the lost stage had; None if the lost stage is the first one
            or the previous stage is lost, too. With tensor parallelism, the blocks of the same tensor-parallel rank.
        following: blocks of the following stage, as for ``previous``; None if there is none or it is lost, too.
        weight_previous: last raw gradient norm of the previous stage; None if there was no step yet. Used by
            ``weighted`` only: if a norm is missing or not finite, the average is uniform, and ``note`` says so.
        weight_following: last raw gradient norm of the following stage, as for ``weight_previous``.
        strategy: one of :data:`STRATEGIES`: ``weighted`` average by gradient norms, ``uniform`` average, or
            ``copy`` of the previous stage (or of the following one if there is no previous one).

    Raises:
        UserError: the strategy cannot be applied to the available neighbours; the message names the
            remaining ways to recover.
        FallbackError: a neighbour holds values that are not finite.
        ValueError: a norm is negative.
    """
    sources = _sources(previous, following, strategy)
    for stage in sources:
        _check_finite(stage)
    if strategy == COPY:
        blocks = [{name: held.detach().clone() for name, held in block.items()} for block in sources[0]]
        return Rebuilt(blocks, strategy, (0.0, 1.0) if previous is None else (1.0, 0.0))
    shares, note = (0.5, 0.5), ""
    if strategy == WEIGHTED:
        shares, note = weights(weight_previous, weight_following)
    pairs = zip(*sources, strict=True)
    blocks = [{name: _mean(before[name], after[name], shares[1]) for name in before} for before, after in pairs]
    return Rebuilt(blocks, strategy, shares, note)


def weights(norm_previous: float | None, norm_following: float | None) -> tuple[tuple[float, float], str]:
    """Return ((share of the previous stage, share of the following stage), note).

    The shares are the norms plus :data:`LEAST_WEIGHT`, scaled to a sum of 1. They are uniform if a norm is missing or
    not finite: a step that overflowed does not show how far a stage has converged, and an infinite weight would make a
    copy of the stage that overflowed.

    Raises:
        ValueError: a norm is negative.
    """
    norms = (norm_previous, norm_following)
    for norm in norms:
        if norm is not None and norm < 0:
            raise ValueError(f"a gradient norm of {norm}")
    unusable = [
        f"the {where} stage's is {'not known' if norm is None else norm}"
        for where, norm in zip(("previous", "following"), norms, strict=True)
        if norm is None or not math.isfinite(norm)
    ]
    if unusable:
        return (0.5, 0.5), f"averaged uniformly: a gradient norm cannot be a weight: {', '.join(unusable)}"
    before, after = (float(norm) + LEAST_WEIGHT for norm in norms)
    largest = max(before, after)  # normalised first, because the sum of two large norms may overflow
    before, after = before / largest, after / largest
    return (before / (before + after), after / (before + after)), ""


def _sources(previous: Sequence[Block] | None, following: Sequence[Block] | None, strategy: str):
    """Return the neighbours that the strategy reads, after checking them."""
    there = [stage for stage in (previous, following) if stage is not None]
    if not there:
        raise UserError("a stage and all its neighbours are lost, so it cannot be rebuilt", LEFT_TO_TRY)
    if len(there) == 2:
        _check_alike(previous, following)
    if strategy == COPY:
        return there[:1]
    if len(there) == 1:
        missing = "previous" if previous is None else "following"
        raise UserError(
            f"a {strategy} average needs both neighbours, and there is no {missing} stage",
            f"copy the first and the last stage (--ft-checkfree-plus keeps that cheap); {LEFT_TO_TRY}",
        )
    return there


def _check_alike(previous: Sequence[Block], following: Sequence[Block]) -> None:
    if len(previous) != len(following):
        raise UserError(
            f"the neighbours of the lost stage hold {len(previous)} and {len(following)} transformer blocks: they "
            "cannot be averaged block by block",
            f"give every stage the same number of layers; {LEFT_TO_TRY}",
        )
    for place, (before, after) in enumerate(zip(previous, following, strict=True)):
        if before.keys() != after.keys():
            only = sorted(before.keys() ^ after.keys())
            raise UserError(
                f"block {place} of the neighbours differs: only one of them has {', '.join(only[:3])}", LEFT_TO_TRY
            )
        for name, held in before.items():
            if held.shape != after[name].shape or held.dtype != after[name].dtype:
                raise UserError(f"{name} of block {place} is {_kind(held)} and {_kind(after[name])}", LEFT_TO_TRY)


def _kind(held: torch.Tensor) -> str:
    return f"{str(held.dtype).removeprefix('torch.')} {list(held.shape)}"


def _check_finite(stage: Sequence[Block]) -> None:
    for place, block in enumerate(stage):
        for name, held in block.items():
            if held.is_floating_point() and not torch.isfinite(held).all():
                raise FallbackError(f"{name} of a neighbour's block {place} holds values that are not finite")


def _mean(before: torch.Tensor, after: torch.Tensor, share: float) -> torch.Tensor:
    """Return (1 - share) x before + share x after, computed by lerp, which keeps equal values bit for bit."""
    if not before.is_floating_point():
        return before.detach().clone()
    wide = torch.promote_types(before.dtype, torch.float32)
    mixed = torch.lerp(before.detach().to(wide), after.detach().to(device=before.device, dtype=wide), share)
    return mixed.to(before.dtype)
