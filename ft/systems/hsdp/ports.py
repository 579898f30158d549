"""Interfaces between FT-HSDP's protocol and the rank that it runs on, and what its two threads tell each other.

A replica is a full copy of the model on its own ranks; the quorum of a step is the set of replicas that take part in
it. :mod:`ft.systems.hsdp.rank` implements the interfaces on a real rank, ``tests/simulation/hsdp`` on a simulated one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from ft.job.quorum import Quorum, Report

Rows = Mapping[int, Sequence[Mapping[str, str]]]
"""Replica -> addresses of each of its ranks, {"ring": "host:port", "fetch": "host:port"}."""


@dataclass(frozen=True)
class Question:
    """A rank's question for the quorum of its next step, with what the agreement thread needs to join that quorum.

    Attributes:
        report: the replica's report to the quorum server; only the leader's is sent.
        is_sure: the replica computes the step already, as if the quorum were unchanged.
        ring_wait_s: seconds for which a ring may make no progress in the step.
        is_last: the replica has done the last step, so it gives nothing to the step of the others.
    """

    report: Report
    is_sure: bool
    ring_wait_s: float
    is_last: bool = False


@dataclass(frozen=True)
class Agreed:
    """What all ranks of the replica know about a step's quorum.

    Attributes:
        quorum: the quorum; None if there is none, for the reason in ``problem``.
        rows: replica -> one row per rank, {"ring": "host:port", "fetch": "host:port"}, for all members of the quorum.
        problem: why there is no quorum, "" if there is one.
    """

    quorum: Quorum | None
    rows: Rows
    problem: str = ""

    @property
    def step(self) -> Quorum | None:
        """The quorum if it has a step to do, else None."""
        quorum = self.quorum
        return None if quorum is None or quorum.load or quorum.finished else quorum


class Gradients(Protocol):
    """The exchange of gradients, as the agreement thread uses it."""

    def give_up(self, problem: str) -> None:
        """End the exchange of this step, and close the ring."""

    def expect(self, limit_s: float) -> None:
        """Set the seconds for which a ring may make no progress."""

    def connect(self, agreed: Agreed, quorum: Quorum) -> None:
        """Begin to connect the ring to the members of ``quorum``."""

    def problem(self, quorum: Quorum, is_sure: bool) -> str:
        """Return why the work of this step cannot end in a commit, "" if it can."""

    def open(self, quorum: Quorum) -> None:
        """Start to exchange the gradients that are complete."""


class Rank(Protocol):
    """A rank with its trainer, as the training thread's protocol uses it. Coroutine methods may take time."""

    @property
    def state(self) -> tuple[int, int]:
        """(committed steps, number of the quorum that committed the last of them) of the training state."""

    @property
    def units(self) -> float:
        """Amount of work of this attempt; see :class:`ft.systems.hsdp.work.Work`."""

    @property
    def failure(self) -> tuple[str, int | None]:
        """Why the exchange of gradients has failed, "" if it has not, and the index of the suspected member."""

    @property
    def is_stale(self) -> bool:
        """Whether the model of this rank was found to differ from that of the other replicas in this attempt."""

    def now(self) -> float:
        """Return the time of a monotonic clock, in seconds."""

    def ask(self, question: Question) -> None:
        """Give a question to the agreement thread; return at once."""

    async def answer(self, why: str) -> Agreed:
        """Return the answer to the last question. ``why``: for whoever watches this rank's progress."""

    async def all_agree(self, is_so: bool) -> bool:
        """Return whether ``is_so`` is true on every rank of the replica; collective."""

    async def suspects(self, own: int | None, members: Sequence[int]) -> tuple[int, ...]:
        """Return the members that any rank of the replica suspects; collective. ``own``: index in ``members``."""

    def begin_exchange(self) -> None:
        """Forget the exchange of the previous attempt."""

    async def take_leave(self, limit_s: float) -> None:
        """Wait until the other replicas have the gradients of the last step."""

    def plan(self, quorum: Quorum | None) -> None:
        """Decide what this replica computes in the step; None: as if the quorum were unchanged."""

    def failed(self) -> None:
        """Note that the work of this attempt is not committed."""

    def advance(self, quorum: Quorum) -> None:
        """Advance the position by the step of ``quorum``, after the update."""

    async def load(self) -> bool:
        """Load the last checkpoint. Return False if there is none."""

    def offer(self) -> None:
        """Offer the state to replicas that are behind, and remember what another attempt starts from."""

    async def withdraw(self, wait_s: float) -> bool:
        """End the offer after ``wait_s`` seconds at most. Return whether a fetch was cut off."""

    async def fetch(self, agreed: Agreed, quorum: Quorum, keeps_state: bool) -> None:
        """Begin to fetch the state of a healthy replica, beside the present state if that is to be kept."""

    async def fetched(self) -> str:
        """Wait for the fetch, and return why it has failed, "" if it has not."""

    def adopt(self) -> None:
        """Replace the present state by the fetched one."""

    async def fetch_rng_and_buffers(self, agreed: Agreed, quorum: Quorum) -> str:
        """Fetch what a forward pass changes of the committed state; return why that has failed, "" if it has not."""

    def adopt_rng_and_buffers(self) -> None:
        """Apply what :meth:`fetch_rng_and_buffers` has fetched."""

    def drop(self) -> None:
        """Give up the state, which must not be used again, and stop offering it."""

    def abandon(self) -> None:
        """Discard what the trainer has computed of the step."""

    def restore(self) -> None:
        """Restore the position and the generators from which the step began."""

    def publish(self) -> None:
        """Copy the optimizer's main parameters to the model."""

    def at(self, phase: str, step: int) -> None:
        """Inject the faults that are planned for this phase of ``step``."""

    def goes_aside(self) -> None:
        """Announce that this replica is busy with something other than a step."""

    def say(self, line: str, *, on_leader: bool = True, on_others: bool = False) -> None:
        """Print a line on these ranks of the replica."""

    def committed(self, quorum: Quorum, seconds: float, caught_up: bool) -> None:
        """Record the committed step, which took ``seconds``."""
