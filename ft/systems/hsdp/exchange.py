"""Gradient exchange of FT-HSDP: all-reduce of the gradients of one rank with the same rank of the other replicas, and
comparison of the replicas of a step (equal models, equal sums of gradients).

The gradients are exchanged by bucket groups (of megatron-core's DDP). All replicas exchange them in one fixed order,
independently of the order in which gradients become complete: a replica that has just returned completes all of them at
the end of its backward pass, the others during it. The all-reduce is done by a ring whose connections belong to one
quorum, the set of replicas that take part in the step. A failure of the exchange raises no exception in this module.
Instead, the ranks of the replica vote after the backward pass, and the vote discards the step on all of them (FT-HSDP,
section 4.1).

If a layer verifies what this replica computes (DMR), nothing is sent before the verification at the end of the backward
pass. After the exchange, the replicas then also compare digests of their models and of the sums.

Each member of the step's quorum fills in one row of a table of zeros, and the all-reduce of the tables gives every
member the whole table. A row is a list of whole numbers below 2**15 in fp32, so their sums are exact.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from ft.protection.contract import Layer
from ft.systems.hsdp.ring import Pending, Ring
from ft.systems.hsdp.ring.staging import when_queued
from ft.systems.hsdp.work import Work

_WORDS = 8
"""Number of 16-bit words of a 128-bit digest."""


@dataclass(frozen=True)
class TableComparison:
    """What the table says.

    Attributes:
        problem: why no member may commit the step; "" if all members are equal.
        is_stale: whether this member's model must be replaced by that of other members.
    """

    problem: str = ""
    is_stale: bool = False


def table(count: int, place: int, model: torch.Tensor | None, sums: torch.Tensor) -> torch.Tensor:
    """Return the table with the row of one member, as fp32 [count, 17].

    Args:
        model: digest of the model with which it has computed its gradients, int64 [2]; None: it has computed none.
        sums: digest of the sums that it has received, int64 [2].
    """
    rows = torch.zeros((count, 1 + 2 * _WORDS), dtype=torch.float32, device="cpu")
    if model is not None:
        rows[place, 0] = 1.0
        rows[place, 1 : 1 + _WORDS] = _words(model)
    rows[place, 1 + _WORDS :] = _words(sums)
    return rows


def compare(rows: torch.Tensor, place: int) -> TableComparison:
    """Compare all members. Every member gets the same ``problem``.

    Members whose model differs from that of the majority are stale. Without a majority, all are.

    Args:
        rows: the sum of the members' tables.
    """
    models = [tuple(row[1 : 1 + _WORDS]) if row[0] else None for row in rows.tolist()]
    computed = [model for model in models if model is not None]
    if len(set(computed)) > 1:
        (most, count), *_ = Counter(computed).most_common(1)
        is_majority = 2 * count > len(computed)
        wrong = [at for at, model in enumerate(models) if model is not None and not (is_majority and model == most)]
        what = "differs from that of the majority" if is_majority else "differs, and no majority has equal ones"
        return TableComparison(f"the model of members {_listed(wrong)} {what}", place in wrong)
    sums = [tuple(row[1 + _WORDS :]) for row in rows.tolist()]
    if len(set(sums)) > 1:
        return TableComparison("the members have received different sums of the gradients")
    return TableComparison()


def _words(digest: torch.Tensor) -> torch.Tensor:
    return digest.detach().cpu().contiguous().view(torch.int16).to(torch.float32)


def _listed(members: Sequence[int]) -> str:
    return ", ".join(map(str, members))


QUORUM, RING = "quorum", "ring"
"""What the training thread can wait for in the exchange."""


class Exchange:
    """The gradient exchange of one rank in one step: the bucket groups first, then the tensors of :meth:`add_up`.

    Nothing is sent until the quorum of the step is known and :meth:`open` is called.

    Args:
        aside: returns a context that is entered while the training thread waits for other replicas, so that the
            watchdog does not take the wait for a hang.
        verifier: layer that verifies the gradients before they are sent; None: they are sent when they are complete.
        model: returns the model's parameters, for the verifier's digest.

    Attributes:
        problem: why the exchange of this step has failed, "" as long as it has not.
        waited_s: seconds that the training thread has waited for the exchange in this step.
        tokens: number of tokens, summed over the replicas before megatron-core divides the gradients by it; None if
            megatron-core does not divide by tokens.
        work: division of the step, which may add gradients kept from earlier attempts; None for a replica that
            contributes no gradients.
        is_repeated: whether the verifier has found the gradients wrong, so that they are computed again.
        is_stale: whether the model of this replica differs from that of the other replicas.
        waits_for: what the training thread waits for in the exchange: the ``QUORUM`` of the step, the ``RING``, or "".
    """

    def __init__(
        self,
        ring: Ring,
        groups: Sequence[Any],
        aside: Callable[[], AbstractContextManager],
        verifier: Layer | None = None,
        model: Callable[[], Sequence[torch.Tensor]] = list,
    ):
        self._ring, self._aside, self._verifier, self._model = ring, aside, verifier, model
        self._order = {id(group): place for place, group in enumerate(groups or [self])}
        self._lock = threading.Lock()
        self._known = threading.Condition(self._lock)
        self.tokens: torch.Tensor | None = None
        self.waits_for = ""
        self.begin()

    def begin(self) -> None:
        """Begin a step, or another attempt at it: clear all state of the previous one."""
        with self._lock:
            self._ready: dict[int, tuple[list[torch.Tensor], Callable[[], None] | None]] = {}
            self._next, self._unfinished = 0, set(self._order)
            self._pending: list[Pending] = []
            self._scale: float | None = None
            self.problem, self.suspect = "", None
            self.tokens = None
            self.work: Work | None = None
            self.waited_s = 0.0
            self.is_repeated = self.is_stale = False
            self._is_verified = self._verifier is None
            self._parts: list[torch.Tensor] = []
            self._member = (0, 1)

    def open(self, scale: float, member: tuple[int, int] = (0, 1)) -> None:
        """Start the exchange; the ring must have been reconfigured for the step's quorum before.

        Args:
            scale: factor by which the sums are multiplied.
            member: index of this replica in the quorum, and number of its members.
        """
        with self._known:
            self._scale, self._member = scale, member
            self._known.notify_all()
            self._go_on()

    def give_up(self, problem: str) -> None:
        """End the exchange of this step because of ``problem``; threads that wait for the exchange continue."""
        with self._known:
            self.problem = self.problem or problem
            self._known.notify_all()
        self._ring.cancel(problem)

    def started(self, group: Any, parts: list[torch.Tensor], reduced: Callable[[], None] | None) -> None:
        """Exchange the gradients of a bucket group in place, as soon as all groups before it in the order have begun.

        Called by :mod:`megatron.patches.replicas`.

        Args:
            group: the bucket group.
            parts: the gradients that this rank exchanges; the result is written into them.
            reduced: waits for the reduction inside the replica, after which ``parts`` can be exchanged. It blocks, or,
                for gradients on a device, makes the current stream of the thread that calls it wait. Any thread may
                call it, any number of times. None: the reduction is complete.
        """
        place = self._order[id(group)]
        if self.work is not None:
            reduced = self.work.kept(place, parts, reduced)
            if self.work.is_apart:
                return
        with self._known:
            self._ready[place] = (parts, reduced)
            self._go_on()

    def finished(self, group: Any) -> None:
        """Note that megatron-core needs the gradients of ``group``.

        With the last group, wait until all groups are exchanged or the exchange fails. A group may be finished more
        than once, as megatron-core does where it finishes a group early to free memory.
        """
        with self._lock:
            if id(group) not in self._unfinished:
                return
            self._unfinished.remove(id(group))
            if self._unfinished:
                return
        if self._verifier is not None:
            self._verify(self._verifier)
        if self.work is not None and self.work.is_apart:
            self.work.reduced(self.tokens)
            self._unfinished, self.tokens = set(self._order), None
            self._is_verified = self._verifier is None
            return
        self._wait_for_all()
        if self._verifier is not None:
            self._compare(self._verifier)
        if self.work is not None:
            self.work.reduced(self.tokens)
        if self.tokens is not None:
            self.add_up(self.tokens)

    def at_once(self, gradients: Sequence[torch.Tensor]) -> None:
        """Exchange all gradients of a model without bucket groups as one group, and wait as in :meth:`finished`."""
        whole = torch.cat([gradient.view(-1) for gradient in gradients])
        self.started(self, [whole], when_queued(whole.device) if whole.is_cuda else None)
        self.finished(self)
        for gradient, part in zip(gradients, whole.split([each.numel() for each in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))

    def add_up(self, tensor: torch.Tensor) -> None:
        """Replace ``tensor`` by its sum over the contributing replicas.

        The sum is computed in fp32, so it is exact for integers up to 2**24. All replicas must call this method equally
        often, after the bucket groups. If the exchange fails, the tensor is left unchanged; and also in a pass whose
        gradients are not exchanged.
        """
        if self.problem or (self.work is not None and self.work.is_apart):
            return
        carried = tensor.detach().to(torch.float32).reshape(-1).cpu()
        with self._lock:
            self._pending.append(self._ring.all_reduce(carried))
        self._wait_for_all()
        if not self.problem:
            tensor.copy_(carried.view(tensor.shape))

    def take_leave(self, limit_s: float) -> None:
        """Wait until the other replicas have all gradients of the last step, for ``limit_s`` seconds at most.

        Called before this process exits, because its exit breaks the ring of the others.
        """
        self.begin()
        self._ring.expect(limit_s)
        self.open(1.0)
        self.add_up(torch.zeros(1, device="cpu"))

    def _verify(self, verifier: Layer) -> None:
        """Have the gradients verified, and start to send them. If they are wrong, forget them."""
        try:
            verifier.verify()
        except BaseException:
            with self._lock:
                self._ready.clear()
                self._unfinished = set(self._order)
                self.tokens, self.is_repeated = None, True
            raise
        with self._known:
            self._is_verified = True
            self._go_on()

    def _compare(self, verifier: Layer) -> None:
        """Compare the models and the sums of all replicas of the step; if they differ, the exchange has failed."""
        if self.problem:
            return
        place, count = self._member
        model = None if self.work is None else verifier.digest(self._model())
        rows = table(count, place, model, verifier.digest(self._parts))
        self.add_up(rows)
        if not self.problem:
            found = compare(rows, place)
            self.problem, self.is_stale = found.problem, found.is_stale

    def _go_on(self) -> None:
        while self._is_verified and self._scale is not None and not self.problem and self._next in self._ready:
            parts, reduced = self._ready.pop(self._next)
            self._next += 1
            if self._verifier is not None:
                self._parts += parts
            for part in parts:
                self._pending.append(self._ring.all_reduce(part, scale=self._scale, after=reduced))

    def _wait_for_all(self) -> None:
        began = time.monotonic()
        with self._aside():
            try:
                self.waits_for = QUORUM
                with self._known:
                    self._known.wait_for(lambda: self._scale is not None or self.problem)
                    pending, self._pending = self._pending, []
                self.waits_for = RING
                for one in pending:
                    outcome = one.wait()
                    if not outcome.ok and not self.problem:
                        self.problem, self.suspect = outcome.reason, outcome.suspect
            finally:
                self.waits_for = ""
        self.waited_s += time.monotonic() - began
