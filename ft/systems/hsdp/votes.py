"""Votes of the ranks of one FT-HSDP replica about a step, so that all of them commit the step or none does.

A vote is an all-reduce of a few bytes over a tree that is used for nothing else.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from ft.state.groups.tree import Tree

_MOST_MEMBERS = 1024
"""Maximum number of replicas that take part in a step."""


class Votes:
    """Votes over ``tree``. Every method is collective, and its result is the same on all ranks."""

    def __init__(self, tree: Tree):
        self._tree = tree
        self._word = torch.zeros(1, dtype=torch.int32, device="cpu")

    def all(self, is_so: bool) -> bool:
        """Return whether ``is_so`` is true on every rank."""
        self._word.fill_(int(is_so))
        self._tree.all_reduce(self._word, dist.ReduceOp.MIN)
        return bool(self._word.item())

    def are_equal(self, values: Sequence[int]) -> bool:
        """Return whether all ranks have called this method with the same values."""
        word = torch.tensor([*values, *(-value for value in values)], dtype=torch.int64, device="cpu")
        self._tree.all_reduce(word, dist.ReduceOp.MIN)
        least = word.tolist()
        return all(low == -high for low, high in zip(least, least[len(values) :], strict=False))

    def suspects(self, own: int | None, members: Sequence[int]) -> tuple[int, ...]:
        """Return the replicas that any rank suspects to have broken the all-reduce between the replicas.

        Args:
            own: index in ``members`` of the replica that this rank suspects, or None.
            members: the replicas that take part in the step.
        """
        is_reached = torch.ones(_MOST_MEMBERS, dtype=torch.int32, device="cpu")
        if own is not None:
            is_reached[own] = 0
        self._tree.all_reduce(is_reached, dist.ReduceOp.MIN)
        return tuple(member for member, is_fine in zip(members, is_reached.tolist(), strict=False) if not is_fine)
