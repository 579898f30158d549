"""The last gradient norm of every pipeline stage, known to every rank.

Each rank's part comes from core's own global norm (``megatron.patches.stage_norms``); all that is added is one
reduction of as many numbers as there are stages, which goes on while the optimizer updates. A stage's norm is over all
that it holds, embedding and head included, and over its tensor- and data-parallel ranks.
"""

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist


class StageNorms:
    """Of one rank.

    Args:
        stages: pipeline stages; own: this rank's. limit: norms above it count as it, as if each stage were clipped by
            itself (what the authors' code weights by); None: raw.

    Attributes:
        values: of the last step that was settled, one for each stage; None before there is one.
    """

    def __init__(self, stages: int, own: int, limit: float | None = None):
        self.values: list[float | None] = [None] * stages
        self._own, self._limit = own, limit
        self._under_way: list[tuple[torch.Tensor, dist.Work]] = []

    def begins(self) -> None:
        """An attempt at an optimizer step begins; what an earlier one has left is forgotten."""
        self._under_way = []

    def heard(self, part: torch.Tensor | None, group: dist.ProcessGroup | None) -> None:
        """Core has taken a norm: ``part`` is this rank's, summed over ``group``. Dense and expert gradients may have
        one each."""
        device = torch.cuda.current_device() if part is None else part.device
        squares = torch.zeros(len(self.values), dtype=torch.float32, device=device)
        if part is not None:
            squares[self._own] = part.reshape(()).float() ** 2
        self._under_way.append((squares, dist.all_reduce(squares, group=group, async_op=True)))

    def settle(self) -> Sequence[float | None]:
        """The values of the step that was just done; the old ones where core took no norm in it (a step that
        overflowed)."""
        if self._under_way:
            total = [0.0] * len(self.values)
            for squares, work in self._under_way:
                work.wait()
                total = [a + b for a, b in zip(total, squares.tolist(), strict=True)]
            self._under_way = []
            norms = [math.sqrt(square) for square in total]
            self.values = norms if self._limit is None else [min(norm, self._limit) for norm in norms]
        return self.values
