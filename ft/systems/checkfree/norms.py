"""Share the last gradient norm of every pipeline stage with all ranks.

CheckFree rebuilds a lost stage as a mean of its neighbours, weighted by their gradient norms (CheckFree, section 4.2).
For gradient clipping, megatron-core computes each rank's part of the norm; ``megatron.patches.stage_norms`` intercepts
it. The only additional cost is one all-reduce of one number per stage, which overlaps the optimizer update. The norm of
a stage is taken over all parameters of the stage, embedding and output layer included, and over its tensor- and
data-parallel ranks.
"""

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist


class StageNorms:
    """Collects the gradient norms of all pipeline stages on one rank.

    Args:
        stages: number of pipeline stages.
        own: this rank's stage.
        limit: upper bound; a larger norm is replaced by it, as if each stage's gradients were clipped separately. The
            code of CheckFree's authors uses such clipped norms as weights. None for raw norms.

    Attributes:
        values: norm of each stage in the last step for which :meth:`settle` was called; None before the first step.
    """

    def __init__(self, stages: int, own: int, limit: float | None = None):
        self.values: list[float | None] = [None] * stages
        self._own, self._limit = own, limit
        self._under_way: list[tuple[torch.Tensor, dist.Work]] = []

    def begins(self) -> None:
        """Begin an attempt at an optimizer step, and drop the reductions that an aborted attempt has started."""
        self._under_way = []

    def heard(self, part: torch.Tensor | None, group: dist.ProcessGroup | None) -> None:
        """Start the reduction of a norm that megatron-core has computed.

        The method may be called several times in a step: dense and expert gradients may have one norm each.

        Args:
            part: norm of this rank's part of the gradients; None if this rank has no part.
            group: process group over which megatron-core combines the parts.
        """
        device = torch.cuda.current_device() if part is None else part.device
        squares = torch.zeros(len(self.values), dtype=torch.float32, device=device)
        if part is not None:
            squares[self._own] = part.reshape(()).float() ** 2
        self._under_way.append((squares, dist.all_reduce(squares, group=group, async_op=True)))

    def settle(self) -> Sequence[float | None]:
        """Return the norms of the step that was just done.

        If megatron-core computed no norm in it (gradient overflow), return the previous norms.
        """
        if self._under_way:
            total = [0.0] * len(self.values)
            for squares, work in self._under_way:
                work.wait()
                total = [a + b for a, b in zip(total, squares.tolist(), strict=True)]
            self._under_way = []
            norms = [math.sqrt(square) for square in total]
            self.values = norms if self._limit is None else [min(norm, self._limit) for norm in norms]
        return self.values
