"""Gradient exchange of one rank with the same rank of the other replicas, bucket group by bucket group.

All replicas exchange the bucket groups in one order, independently of the order in which their gradients become
complete: a replica that has just returned completes them at the end of its backward pass, the others during it. A
failure of the exchange raises nothing here. The step goes on to the vote, which discards it on all ranks of the replica
alike (FT-HSDP, section 4.1).
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

    Nothing is sent until the quorum of the step is known and :meth:`open` is called.

    Args:
        ring: ring with the same rank of the other replicas.
        groups: bucket groups, in the order common to all replicas.
        aside: context entered while the training thread waits for other replicas, so that this is not taken for a hang.

    Attributes:
        problem: why there is no exchange in this step, "" while there is one.
        suspect: index in the ring of the member to blame, None if unknown.
        waited_s: seconds that the training thread has waited here in this step.
        tokens: number of tokens, summed over the replicas before core divides by it.
        work: division of the step, which may add gradients kept from earlier attempts; None for a replica that
            contributes none.
    """

    def __init__(self, ring: Ring, groups: Sequence[Any], aside: Callable[[], AbstractContextManager]):
        self._ring, self._aside = ring, aside
        self._order = {id(group): place for place, group in enumerate(groups)}
        self._lock = threading.Lock()
        self._known = threading.Condition(self._lock)
        self.tokens: torch.Tensor | None = None
        self.begin()

    def begin(self) -> None:
        """Begin a step, or another attempt at it: clear everything of the previous one."""
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
        """Start the exchange: the ring is that of the step's quorum. ``scale``: factor of the sums."""
        with self._known:
            self._scale = scale
            self._known.notify_all()
            self._go_on()

    def give_up(self, problem: str) -> None:
        """End the exchange of this step; threads that wait for it go on to the vote."""
        with self._known:
            self.problem = self.problem or problem
            self._known.notify_all()
        self._ring.cancel(problem)

    def started(self, group: Any, parts: list[torch.Tensor], reduced: Callable[[], None] | None) -> None:
        """Exchange ``parts`` (flat tensors, in place) when it is the group's turn; see
        :class:`megatron.patches.replicas.Exchange`.
        """
        place = self._order[id(group)]
        if self.work is not None:
            reduced = self.work.kept(place, parts, reduced)
        with self._known:
            self._ready[place] = (parts, reduced)
            self._go_on()

    def finished(self, group: Any) -> None:
        """Note that core needs the gradients of ``group``. With the last group, wait until all are exchanged or the
        step fails.
        """
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
        """Replace ``tensor`` by its sum over the contributing replicas, computed in fp32: exact for integers up to
        2**24.

        To be called after the bucket groups, on all replicas alike. If the exchange fails, the tensor is left
        unchanged.
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
        """Wait for ``limit_s`` seconds at most until the others have all gradients of the last step: this replica's
        exit will break their ring.
        """
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
                reduced = None  # one reduction serves all buckets of a group

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
