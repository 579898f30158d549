"""A real rank under FT-HSDP's protocol: its ring, votes, state server, trainer and records, as the protocol uses them.

All methods block, also those that are coroutines: these may take time, and the simulation (``tests/simulation/hsdp``)
has models of them that give way to other ranks.

A vote is an all-reduce of a few bytes over a tree that is used for nothing else.
"""

import contextlib
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ft.base import events
from ft.base.errors import EpochClosed
from ft.job.quorum import Quorum
from ft.job.quorum.values import committed_in
from ft.state.groups.tree import Tree
from ft.systems.hsdp.components import FETCHES, SERVES, Components
from ft.systems.hsdp.protocol import Agreed, Question, QuorumMembership
from megatron.patches.step_state import clear_losses

_BITS = 62


def digest(tensors: Mapping[str, torch.Tensor], tree: Tree) -> int:
    """Return the digest of the tensors of all ranks of ``tree``. All ranks have to call it, and get the same digest.

    Each rank's contribution depends on names, order, every bit, and the rank.
    """
    word = tree.rank + 1
    for name in sorted(tensors):
        word = zlib.crc32(name.encode(), word)
        content = tensors[name].detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        word = zlib.crc32(content.numpy(), word)
    mixed = torch.tensor([word * 0x9E3779B97F4A7C15 % (1 << _BITS) >> 16], dtype=torch.int64, device="cpu")
    tree.all_reduce(mixed, dist.ReduceOp.SUM)
    return int(mixed.item())


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


class TrainingRank:
    """One rank with its trainer. Used by the training thread, and where that is said by the agreement thread."""

    def __init__(self, parts: Components, load: Callable[[], bool]):
        self._parts, self._load = parts, load
        self._position, self._exchange, self._work = parts.position, parts.exchange, parts.work
        self._membership = QuorumMembership(parts.place.replica, self)
        self._votes = Votes(parts.votes)
        self._start: dict[str, Any] | None = None
        # For the record of a step: (lineage, position in the sample stream) before it, digest of its parameters.
        self._before: tuple[int, int | None] = (0, None)
        self._computed_with: int | None = None
        self._adopted: tuple[int, ...] = ()

    # --- time and talk ------------------------------------------------------------------------------------------------

    def now(self) -> float:
        """Return the time of a monotonic clock, in seconds."""
        return time.monotonic()

    def at(self, phase: str, step: int) -> None:
        """Inject the faults that are planned for this phase of ``step``."""
        self._parts.injector.at(phase, step)

    def say(self, line: str, *, on_leader: bool = True, on_others: bool = False) -> None:
        """Print a line on these ranks of the replica."""
        if on_others if self._parts.session.rank else on_leader:
            print(line, flush=True)

    def goes_aside(self) -> None:
        """Announce that this replica is busy with something other than a step."""
        if self._parts.client is not None:
            self._parts.client.aside()

    def _aside(self, why: str) -> contextlib.AbstractContextManager:
        return self._parts.session.progress.at("aside", why)

    # --- the quorum ---------------------------------------------------------------------------------------------------

    def ask(self, question: Question) -> None:
        """Give a question to the agreement thread; return at once."""
        self._parts.agreement.ask(question, self._membership.join)

    async def answer(self, why: str) -> Agreed:
        """Return the answer to the last question. ``why`` names what the rank waits for, for hang detection."""
        with self._aside(why):
            agreed = self._parts.agreement.wait()
        session = self._parts.session
        if agreed.quorum is None and session.closed:
            raise EpochClosed(session.closed_epoch, agreed.problem)
        return agreed

    def is_uniform(self) -> bool:
        """Return whether all ranks of the replica have the state of the same step; collective."""
        return self._votes.are_equal((*self.state, int(self._position.has_state)))

    async def all_agree(self, is_so: bool) -> bool:
        """Return whether ``is_so`` is true on every rank of the replica; collective."""
        return self._votes.all(is_so)

    async def suspects(self, own: int | None, members: Sequence[int]) -> tuple[int, ...]:
        """Return the members that any rank of the replica suspects; collective. ``own``: index in ``members``."""
        return self._votes.suspects(own, members)

    # --- the exchange of gradients, as the agreement thread uses it ---------------------------------------------------

    def give_up(self, problem: str) -> None:
        """End the exchange of this step, and close the ring."""
        self._exchange.give_up(problem)

    def expect(self, limit_s: float) -> None:
        """Set the seconds for which a ring may make no progress."""
        self._parts.ring.expect(limit_s)

    def connect(self, agreed: Agreed, quorum: Quorum) -> None:
        """Begin to connect the ring to the members of ``quorum``."""
        addresses = [agreed.rows[replica][self._parts.session.rank]["ring"] for replica in quorum.members]
        self._parts.doing.quorums.append(quorum)
        self._parts.ring.reconfigure(quorum.number, addresses, quorum.members.index(self._parts.place.replica))

    def problem(self, quorum: Quorum, is_sure: bool) -> str:
        """Return why the work of this step cannot end in a commit, "" if it can."""
        return self._work.problem(quorum, is_sure)

    def open(self, quorum: Quorum) -> None:
        """Start to exchange the gradients that are complete."""
        members = quorum.members
        member = members.index(self._parts.place.replica), len(members)
        self._exchange.open(1.0 if self._parts.per_token else self._work.scale(quorum), member)

    # --- a step -------------------------------------------------------------------------------------------------------

    @property
    def state(self) -> tuple[int, int]:
        """(committed steps, number of the quorum that committed the last of them) of the training state."""
        return (self._position.step, self._position.lineage)

    @property
    def units(self) -> float:
        """Amount of work of this attempt; see :class:`ft.systems.hsdp.work.Work`."""
        return self._work.units

    @property
    def failure(self) -> tuple[str, int | None]:
        """Why the exchange of gradients has failed, "" if it has not, and the index of the suspected member."""
        return (self._exchange.problem, self._exchange.suspect)

    @property
    def is_stale(self) -> bool:
        """Whether the model of this rank was found to differ from that of the other replicas in this attempt."""
        return self._exchange.is_stale

    def begin_exchange(self) -> None:
        """Forget the exchange of the previous attempt."""
        self._exchange.begin()

    async def take_leave(self, limit_s: float) -> None:
        """Wait until the other replicas have the gradients of the last step."""
        self._exchange.take_leave(limit_s)

    def plan(self, quorum: Quorum | None) -> None:
        """Decide what this replica computes in the step; None: as if the quorum were unchanged."""
        self._work.plan(quorum)
        self._exchange.work = self._work

    def computes(self) -> None:
        """Prepare for forward and backward passes; if they are repeated, with the same samples."""
        if self._exchange.is_repeated:
            self._exchange.is_repeated = False
            self._position.follow()
            self._work.again()

    def next_pass(self) -> None:
        """Begin the next pass of an attempt, after one whose gradients are only kept."""
        clear_losses()
        self._work.next_pass()

    def failed(self) -> None:
        """Note that the work of this attempt is not committed."""
        self._work.failed()

    def about_to_update(self, computed: bool) -> None:
        """Note what the record of the step has to say about the state before it.

        Args:
            computed: this replica has computed gradients in the step.
        """
        at = self._position.began_at(self._parts.batch) if computed else None
        self._before = committed_in(self._position.lineage), at
        self._computed_with = self._digest(self._parts.state.parameters) if computed else None

    def advance(self, quorum: Quorum) -> None:
        """Advance the position by the step of ``quorum``, after the update."""
        self._position.advance(self._work.streams(quorum), self._parts.batch, quorum.number)
        self._work.committed(quorum)

    def committed(self, quorum: Quorum, seconds: float, caught_up: bool) -> None:
        """Record the committed step, which took ``seconds``."""
        position, proof = self._position, self._digest(self._parts.state.tensors)
        if caught_up:
            self._parts.catch_up.log_caught_up(position.step)
        if self._parts.records is not None:
            self._parts.records.committed(
                *(position, quorum, self._work, *self._before, seconds, self._exchange.waited_s, proof),
                self._computed_with,
            )
        self._log_adopted()
        self._parts.session.progress.committed(position.step, is_usual=not caught_up)

    def _log_adopted(self) -> None:
        """Log the event that other shard types than before have no host, on the leader."""
        session, types = self._parts.session, self._work.adopted
        if types != self._adopted and session.rank == 0:
            place = self._parts.place
            session.observe(events.TYPES_ADOPTED, replica=place.replica, step=self._position.step, types=list(types))
        self._adopted = types

    def _digest(self, tensors: Callable[[], Mapping[str, torch.Tensor]]) -> int | None:
        return digest(tensors(), self._parts.votes) if self._parts.place.digests else None

    # --- the state ----------------------------------------------------------------------------------------------------

    async def load(self) -> bool:
        """Load the last checkpoint. Return False if there is none."""
        return self._load()

    def offer(self) -> None:
        """Offer the state to replicas that are behind, and remember what another attempt starts from."""
        tensors, self._start = self._parts.state.whole()
        self._parts.server.offer(*self.state, tensors, self._start)

    async def withdraw(self, wait_s: float) -> bool:
        """End the offer after ``wait_s`` seconds at most. Return whether a fetch was cut off."""
        if not wait_s:
            return bool(self._parts.server.withdraw())
        with self._aside("a replica that fetches"), self._parts.doing.waiting(SERVES):
            return bool(self._parts.server.withdraw(wait_s))

    async def fetch(self, agreed: Agreed, quorum: Quorum, keeps_state: bool) -> None:
        """Begin to fetch the state of a healthy replica, beside the present state if that is to be kept."""
        self._parts.catch_up.begin(agreed, keeps_state=keeps_state)

    async def fetched(self) -> str:
        """Wait for the fetch, and return why it has failed, "" if it has not."""
        with self._aside("fetch"), self._parts.doing.waiting(FETCHES):
            return self._parts.catch_up.wait()

    def adopt(self) -> None:
        """Replace the present state by the fetched one."""
        self._parts.catch_up.adopt()
        self._start = self._parts.state.whole()[1]

    async def fetch_rng_and_buffers(self, agreed: Agreed, quorum: Quorum) -> str:
        """Fetch what a forward pass changes of the committed state; return why that has failed, "" if it has not."""
        with self._parts.doing.waiting(FETCHES):
            return self._parts.catch_up.fetch_rng_and_buffers(agreed, self._position.step)

    def adopt_rng_and_buffers(self) -> None:
        """Apply what :meth:`fetch_rng_and_buffers` has fetched."""
        self._parts.catch_up.adopt_rng_and_buffers()

    def drop(self) -> None:
        """Give up the state, which must not be used again, and stop offering it."""
        self._parts.server.withdraw()
        self._position.has_state = False

    def abandon(self) -> None:
        """Discard what the trainer has computed of the step."""
        self._parts.subject.abandon_step()

    def restore(self) -> None:
        """Restore the position and the generators from which the step began."""
        self._parts.state.apply(self._start)

    def publish(self) -> None:
        """Copy the optimizer's main parameters to the model.

        Must not be called before the gradients of the step are exchanged: until then megatron-core assumes that the
        model's parameters are already gathered.
        """
        self._parts.subject.publish_parameters()
