"""Keep what this rank has computed of a step's gradient: the sum over the shard types that its group has computed so
far.

The ring all-reduce adds in place, so that after a failed exchange its input is lost. A copy of the gradients that are
reduced inside the group (with the distributed optimizer: of this rank's shard) is therefore kept until the step is
committed. A step in which a group is lost is then repeated without computing anything twice: only the types of the lost
group are computed, and added.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

Reduced = Callable[[], None] | None


@dataclass(frozen=True)
class _Entry:
    """The tensors of a bucket group. ``reduced`` waits for their reduction inside the group."""

    parts: list[torch.Tensor]
    reduced: Reduced


class Ledger:
    """The gradients of one rank in one step.

    Attributes:
        types: shard types whose gradients are included.
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
        """Return the included types together with those of the current attempt."""
        return (*self.types, *self._adding)

    def clear(self) -> None:
        """Drop everything: a new step begins, or what was kept is no longer usable."""
        self.types, self._adding, self._sums, self._tokens = (), (), None, None
        self._open.clear()

    def begin(self, types: Sequence[int], weight: float) -> None:
        """Begin an attempt that computes ``types`` in addition. ``weight``: factor of its gradients."""
        self._adding, self._weight = tuple(types), weight
        self._open.clear()

    def entering(self, place: int, parts: list[torch.Tensor], reduced: Reduced) -> Callable[[], None]:
        """Register the tensors ``parts`` of bucket group ``place``, which are complete in this attempt.

        Returns:
            A function to be called before they are exchanged; after it, ``parts`` hold the whole contribution of this
                rank.
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
        """Include what was registered but not exchanged. Must be called before core divides the gradients or reduces
        them over model-parallel ranks."""
        for place in list(self._open):
            self._take(place)

    def settle(self) -> None:
        """End the attempt: its types are now included."""
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
