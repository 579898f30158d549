"""One rank's gradients on their way to the same rank of the other replicas, bucket group by bucket group.

All replicas exchange the bucket groups in one order, whatever order each finds them complete in: a replica that has
just come back completes them at the end of its backward, the others as it goes. Nothing here raises when the exchange
fails: the step goes on to the vote, which takes it back on all ranks of the replica alike (paper, section 4.1).
"""

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from ft.systems.hsdp.ring import Pending, Ring
from ft.systems.hsdp.work import Work


class Exchange:
    """Everything that one rank exchanges in a step: its bucket groups, then the sums of :meth:`add_up`.

    Held back until the quorum of the step is known: :meth:`open`.

    Attributes:
        problem: why there is no exchange in this step, "" while there is. suspect: index in the ring of who is to
            blame, if known. waited_s: what the training thread has waited here in this step.
        tokens: is added up over the replicas before core divides by it.
        work: what keeps this replica's part of the gradient, None for a replica that gives none.

    Args:
        ring: with the same rank of the other replicas. groups: bucket groups, in the order of all replicas.
        aside: entered while the training thread waits for other replicas, which is no hang of this one.
    """

    def __init__(self, ring: Ring, groups: Sequence[Any], aside: Callable[[], AbstractContextManager]):
        self._ring, self._aside = ring, aside
        self._order = {id(group): place for place, group in enumerate(groups)}
        self._lock = threading.Lock()
        self._known = threading.Condition(self._lock)
        self.tokens: torch.Tensor | None = None
        self.begin()

    def begin(self) -> None:
        """A step begins, or begins anew: nothing of the last one is left."""
        with self._lock:
            self._ready: dict[int, tuple[list[torch.Tensor], Callable[[], None] | None]] = {}
            self._next, self._unfinished = 0, len(self._order)
            self._pending: list[Pending] = []
            self._scale: float | None = None
            self.problem, self.suspect = "", None
            self.tokens = None
            self.work: Work | None = None
            self.waited_s = 0.0

    def open(self, scale: float) -> None:
        """The ring is that of the step's quorum: what is ready goes. ``scale``: what sums are multiplied with."""
        with self._known:
            self._scale = scale
            self._known.notify_all()
            self._go_on()

    def give_up(self, problem: str) -> None:
        """There is no exchange in this step; whoever waits for it goes on to the vote."""
        with self._known:
            self.problem = self.problem or problem
            self._known.notify_all()
        self._ring.cancel(problem)

    def started(self, group: Any, parts: list[torch.Tensor], reduced: Callable[[], None] | None) -> None:
        """See :class:`megatron.patches.replicas.Exchange`; ``parts``: flat tensors, exchanged in place."""
        place = self._order[id(group)]
        if self.work is not None:
            reduced = self.work.kept(place, parts, reduced)
        with self._known:
            self._ready[place] = (parts, reduced)
            self._go_on()

    def finished(self, group: Any) -> None:
        """Core may use the gradients once the last group has been asked for: then all are there, or the step fails."""
        with self._lock:
            self._unfinished -= 1
            if self._unfinished:
                return
        self._wait_for_all()
        if self.work is not None:
            self.work.reduced(self.tokens)
        if self.tokens is not None:
            self.add_up(self.tokens)

    def add_up(self, tensor: torch.Tensor) -> None:
        """The sum of ``tensor`` over the replicas that contribute, in its place; exact for integers up to 2**24.

        After the bucket groups, on all replicas alike. Without an exchange it is left as it is.
        """
        if self.problem:
            return
        carried = tensor.detach().to(torch.float32).reshape(-1).cpu()
        with self._lock:
            self._pending.append(self._ring.all_reduce(carried))
        self._wait_for_all()
        if not self.problem:
            tensor.copy_(carried.view(tensor.shape))

    def take_leave(self, limit_s: float) -> None:
        """Waits until the others have all gradients of the last step, too: an end that they see breaks their ring."""
        self.begin()
        self._ring.expect(limit_s)
        self.open(1.0)
        self.add_up(torch.zeros(1, device="cpu"))

    def _go_on(self) -> None:
        while self._scale is not None and not self.problem and self._next in self._ready:
            parts, reduced = self._ready.pop(self._next)
            self._next += 1
            for part in parts:
                self._pending.append(self._ring.all_reduce(part, scale=self._scale, after=reduced))
                reduced = None  # one reduction for all buckets of a group

    def _wait_for_all(self) -> None:
        began = time.monotonic()
        with self._aside():
            with self._known:
                self._known.wait_for(lambda: self._scale is not None or self.problem)
                pending, self._pending = self._pending, []
            for one in pending:
                outcome = one.wait()
                if not outcome.ok and not self.problem:
                    self.problem, self.suspect = outcome.reason, outcome.suspect
        self.waited_s += time.monotonic() - began
