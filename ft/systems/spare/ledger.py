"""What a rank has of a step's gradient: the sum over the shard types that its group has computed of it.

The ring adds up in place, so a failed exchange leaves nothing of what went in. One copy of what is reduced inside the
group (with the distributed optimizer: of this rank's shard) is kept until the step is committed, and a step that loses
a group is tried again without computing anything twice: only the lost group's types are computed anew, and added.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

Reduced = Callable[[], None] | None


@dataclass(frozen=True)
class _Entry:
    """Tensors of a bucket group; ``reduced`` waits for their reduction inside the group."""

    parts: list[torch.Tensor]
    reduced: Reduced


class Ledger:
    """Of one rank and one step.

    Attributes:
        types: whose gradients are in it.
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
        """Those of the attempt under way among them."""
        return (*self.types, *self._adding)

    def clear(self) -> None:
        """A step begins, or what was kept of it is of no use any more."""
        self.types, self._adding, self._sums, self._tokens = (), (), None, None
        self._open.clear()

    def begin(self, types: Sequence[int], weight: float) -> None:
        """An attempt computes ``types`` in addition. ``weight``: what its gradient is multiplied with."""
        self._adding, self._weight = tuple(types), weight
        self._open.clear()

    def entering(self, place: int, parts: list[torch.Tensor], reduced: Reduced) -> Callable[[], None]:
        """``parts`` of bucket group ``place`` are complete in this attempt.

        Returns:
            what is to be called before they are exchanged; then they hold all that this rank gives.
        """
        self._open[place] = _Entry(parts, reduced)
        return lambda: self._take(place)

    def add_sums(self, sums: torch.Tensor) -> torch.Tensor:
        """Sums of losses and the like: those of this attempt in, those of all of them out."""
        self._sums = sums if self._sums is None or not self.types else self._sums + sums
        return self._sums.clone()

    def add_tokens(self, tokens: torch.Tensor) -> None:
        """Tokens of this attempt in, those of all of them out, in their place."""
        if self._tokens is not None and self.types:
            tokens.add_(self._tokens)
        self._tokens = tokens.clone()

    def take_all(self) -> None:
        """What was never exchanged is taken, too: now, before core divides it, or adds up over model-parallel ranks."""
        for place in list(self._open):
            self._take(place)

    def settle(self) -> None:
        """The attempt is over, and what it has computed is in."""
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
