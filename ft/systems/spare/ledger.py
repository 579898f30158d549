"""Keep the gradients that this rank has computed in a step, so that they survive a failed gradient exchange (SPARe).

In SPARe a step's data are divided into shards, called shard types, and each group (a replica of the model) computes
several types. The gradients are reduced inside the group first and then between the groups, by a ring all-reduce that
adds in place: if the exchange fails, its input is lost. Therefore a copy of the gradients (with the distributed
optimizer: of this rank's shard of them) is taken before the exchange and kept until the step is committed. If a group
is lost, the step is repeated in another attempt, which computes only the types of the lost group and adds them to the
copy; nothing is computed twice.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

Reduced = Callable[[], None] | None


@dataclass(frozen=True)
class _Entry:
    """The gradient tensors of a bucket group (of megatron-core's DDP).

    ``reduced`` waits until the tensors are reduced inside the group; None if there is nothing to wait for.
    """

    parts: list[torch.Tensor]
    reduced: Reduced


class GradientStore:
    """The gradients of one rank in one step, over all attempts at the step.

    Attributes:
        types: shard types whose gradients earlier attempts have included.
    """

    def __init__(self):
        self.types: tuple[int, ...] = ()
        self._kept: dict[int, list[torch.Tensor]] = {}
        self._sums: torch.Tensor | None = None
        self._tokens: torch.Tensor | None = None
        self._adding: tuple[int, ...] = ()
        self._weight = 1.0
        self._open: dict[int, _Entry] = {}
        self._lock = threading.Lock()

    @property
    def all_types(self) -> tuple[int, ...]:
        """Return the shard types of earlier attempts and of the current attempt."""
        return (*self.types, *self._adding)

    def clear(self) -> None:
        """Drop all gradients, because a new step begins or the gradients are no longer usable."""
        self.types, self._adding, self._sums, self._tokens = (), (), None, None
        self._open.clear()

    def begin(self, types: Sequence[int], weight: float) -> None:
        """Begin an attempt that computes further shard types.

        Args:
            types: the shard types that this attempt computes.
            weight: factor by which the gradients of this attempt are multiplied.
        """
        self._adding, self._weight = tuple(types), weight
        self._open.clear()

    def entering(self, place: int, parts: list[torch.Tensor], reduced: Reduced) -> Callable[[], None]:
        """Register the gradients of a bucket group when the current attempt has computed them.

        Args:
            place: number of the bucket group.
            parts: its gradient tensors.
            reduced: waits until ``parts`` are reduced inside the group; None if there is nothing to wait for.

        Returns:
            A function that adds the gradients of earlier attempts to ``parts`` and copies the sum. It must be called
            before ``parts`` are exchanged between the groups.
        """
        self._open[place] = _Entry(parts, reduced)
        return lambda: self._take(place)

    def add_sums(self, sums: torch.Tensor) -> torch.Tensor:
        """Add the sums (of losses and similar values) of this attempt and return the sums of all attempts."""
        self._sums = sums if self._sums is None or not self.types else self._sums + sums
        return self._sums.clone()

    def add_tokens(self, tokens: torch.Tensor) -> None:
        """Replace the number of tokens of this attempt, in place, by that of all attempts."""
        if self._tokens is not None and self.types:
            tokens.add_(self._tokens)
        self._tokens = tokens.clone()

    def take_all(self) -> None:
        """Include all gradients that were registered but not exchanged.

        Must be called before megatron-core divides the gradients or reduces them over model-parallel ranks.
        """
        for place in list(self._open):
            self._take(place)

    def settle(self) -> None:
        """End a failed attempt: its gradients are kept, so its shard types move to ``types``."""
        self.types, self._adding = (*self.types, *self._adding), ()

    def _take(self, place: int) -> None:
        with self._lock:
            entry = self._open.pop(place, None)
        if entry is None:
            return
        if entry.reduced is not None:
            entry.reduced()
        kept = self._kept.get(place)
        if kept is None:
            kept = self._kept[place] = [torch.empty_like(part) for part in entry.parts]
        for mine, part in zip(kept, entry.parts, strict=True):
            if self.types:
                mine.add_(part, alpha=self._weight)
            elif self._weight == 1.0:
                mine.copy_(part)
                continue
            else:
                torch.mul(part, self._weight, out=mine)
            part.copy_(mine)
