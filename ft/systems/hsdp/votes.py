"""What the ranks of a replica tell one another about a step: a few bytes over a group of their own."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

_MOST_MEMBERS = 1024
"""Of a quorum."""


class Votes:
    """Every method is collective in ``group``, and its answer is the same on all its ranks."""

    def __init__(self, group: dist.ProcessGroup):
        self._group = group
        self._word = torch.zeros(1, dtype=torch.int32, device="cpu")

    def all(self, is_so: bool) -> bool:
        """Whether it is so on every rank."""
        self._word.fill_(int(is_so))
        dist.all_reduce(self._word, op=dist.ReduceOp.MIN, group=self._group)
        return bool(self._word.item())

    def suspects(self, own: int | None, members: Sequence[int]) -> tuple[int, ...]:
        """Those of ``members`` whom the ring of any rank could not reach; ``own``: this rank's, by index."""
        is_reached = torch.ones(_MOST_MEMBERS, dtype=torch.int32, device="cpu")
        if own is not None:
            is_reached[own] = 0
        dist.all_reduce(is_reached, op=dist.ReduceOp.MIN, group=self._group)
        return tuple(member for member, is_fine in zip(members, is_reached.tolist(), strict=False) if not is_fine)
