"""Keep the gradients that this rank has computed in a step, so that each can be added to the sum or left out (SPARe).

A group computes several shard types, in one or several passes (forward and backward). The gradients are reduced inside
the group first and then between the groups, by a ring all-reduce that adds in place: if the exchange fails, its input
is lost. Therefore a copy of each pass's gradients (with the distributed optimizer: of this rank's shard of them) is
kept until the step is committed. A type that another group adds to the sum is computed in a pass of its own and stays
out of the exchange; if that group is lost, this one adds the copy, and nothing is computed again. If a type has to be
computed in addition, another attempt at the step computes only this type.
"""

import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import torch

from ft.systems.hsdp.work import Reduced

_Parts = list[torch.Tensor]


@dataclass
class _Pass:
    """What one pass has computed.

    Attributes:
        buckets: bucket group -> copies of its gradients.
        tokens: the pass's number of tokens, None if megatron-core does not divide by it.
    """

    types: tuple[int, ...]
    buckets: dict[int, _Parts] = field(default_factory=dict)
    sums: torch.Tensor | None = None
    tokens: torch.Tensor | None = None


class GradientStore:
    """The gradients of one rank in one step, over all attempts at the step."""

    def __init__(self):
        self._kept: list[_Pass] = []
        self._spare: list[dict[int, _Parts]] = []  # buffers of earlier steps
        self._pass = _Pass(())
        self._weight, self._is_apart, self._is_complete = 1.0, False, False
        self._wanted: frozenset[int] = frozenset()
        # bucket group -> its gradients in the current pass, and what waits until they are reduced inside the group
        self._open: dict[int, tuple[_Parts, Reduced]] = {}
        self._lock = threading.Lock()

    @property
    def types(self) -> tuple[int, ...]:
        """Return the shard types of all passes that are complete."""
        return tuple(kind for each in self._kept for kind in each.types)

    @property
    def added(self) -> tuple[int, ...]:
        """Return the shard types that the current pass adds to the sum: its own and those of earlier passes."""
        return (*self._pass.types, *(kind for each in self._chosen(self._wanted) for kind in each.types))

    def usable(self, wanted: Collection[int]) -> tuple[int, ...]:
        """Return the types among ``wanted`` whose gradients earlier passes have, without any other type's in them."""
        return tuple(kind for each in self._chosen(wanted) for kind in each.types)

    def clear(self) -> None:
        """Drop all gradients, because a new step begins."""
        self._spare += [each.buckets for each in self._kept if each.buckets]
        self._kept, self._pass = [], _Pass(())
        self._open.clear()

    def want(self, types: Collection[int]) -> None:
        """Set the types that this rank adds to the sum, before the exchange between the groups begins.

        Of these, the pass that is exchanged computes some, and earlier passes have the others.
        """
        self._wanted = frozenset(types)

    def begin(self, types: Sequence[int], weight: float, is_apart: bool = False) -> None:
        """Begin a pass.

        Args:
            weight: factor by which its gradients are multiplied.
            is_apart: its gradients are kept, but not exchanged.
        """
        self._pass = _Pass(tuple(types), self._spare.pop() if types and self._spare else {})
        self._weight, self._is_apart, self._is_complete = weight, is_apart, False
        self._open.clear()

    def entering(self, place: int, parts: _Parts, reduced: Reduced) -> Callable[[], None]:
        """Register the gradients of a bucket group when the current pass has computed them.

        Returns:
            A function that copies the gradients and adds those of earlier passes to ``parts``. It must be called before
            ``parts`` are exchanged between the groups.
        """
        self._open[place] = parts, reduced
        return lambda: self._take(place)

    def add_sums(self, sums: torch.Tensor) -> torch.Tensor:
        """Note the sums (of losses and similar values) of this pass; return the sums of all types that are added."""
        self._pass.sums = sums.clone()
        others = (each.sums for each in self._chosen(self._wanted) if each.sums is not None)
        return sum(others, sums.clone())

    def add_tokens(self, tokens: torch.Tensor) -> None:
        """Note the number of tokens of this pass, and replace it, in place, by that of all types that are added."""
        self._pass.tokens = tokens.clone()
        for each in self._chosen(self._wanted):
            if each.tokens is not None:
                tokens.add_(each.tokens)

    def take_all(self) -> None:
        """Copy all gradients that were registered but not exchanged: the pass has computed everything.

        Must be called before megatron-core divides the gradients or reduces them over model-parallel ranks.
        """
        for place in list(self._open):
            self._take(place)
        self._is_complete = True

    def settle(self) -> None:
        """End a pass without a commit: its gradients stay for later passes, unless it was interrupted."""
        if self._pass.types and self._is_complete:
            self._kept.append(self._pass)
        self._pass = _Pass(())

    def _chosen(self, wanted: Collection[int]) -> list[_Pass]:
        """Return the complete passes to add for ``wanted``: each type once, and none that the current pass computes."""
        left, found = set(wanted) - set(self._pass.types), []
        for each in self._kept:
            if left.issuperset(each.types):
                left.difference_update(each.types)
                found.append(each)
        return found

    def _take(self, place: int) -> None:
        with self._lock:
            registered = self._open.pop(place, None)
        if registered is None:
            return
        parts, reduced = registered
        if reduced is not None:
            reduced()
        own = self._pass.buckets
        if self._pass.types:
            if place not in own:
                own[place] = [torch.empty_like(part) for part in parts]
            for mine, part in zip(own[place], parts, strict=True):
                torch.mul(part, self._weight, out=mine)
        if self._is_apart:
            return
        others = [each.buckets[place] for each in self._chosen(self._wanted)]
        for index, part in enumerate(parts):
            if self._pass.types and self._weight != 1.0:
                part.copy_(own[place][index])
            for kept in others:
                part.add_(kept[index])
