"""FT-HSDP's protocol on one rank as coroutines without I/O: quorum, vote, commit, catch-up, retry and end of the run.

A rank has two threads. The training thread runs :class:`Steps`. The agreement thread runs :class:`QuorumMembership`,
which gets everything that it has to know of the training thread with each question, so that no field is written by
both. What they do to the outside are methods of the rank (:class:`ft.systems.hsdp.rank.TrainingRank`). On a real rank,
all methods block, so that :func:`ft.worker.protocol.run` gets the result of a coroutine at once; the simulation
(``tests/simulation/hsdp``) suspends the coroutines in virtual time.

One replica writes the final checkpoint, and no other replica exits before it is complete. The replica that writes it
may die meanwhile, and replicas that have exited by then could not replace it. So all replicas that have done the last
step repeatedly ask the quorum server for a quorum until the checkpoint is complete, and another one writes it if
necessary.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from ft.base.errors import RecoverableError
from ft.job.quorum import Quorum, Report
from ft.job.replicas.deadlines import LastDurations, RingLimits, fetch_wait

if TYPE_CHECKING:
    from ft.systems.hsdp.rank import TrainingRank


class Retry(RecoverableError):
    """No rank of this replica has committed the step, so the replica repeats it with a new set of replicas (quorum)."""


class RunIsOver(RecoverableError):
    """The other replicas have done the last step of the run, so this replica has nothing left to do."""


class PassIsOver(RecoverableError):
    """A forward and backward pass of a step is complete whose gradients this replica only keeps; the step goes on."""


def is_same_ring(last: Quorum | None, quorum: Quorum) -> bool:
    """Return whether all members of ``quorum`` still have the unbroken connections of the quorum ``last``.

    That is the case if every member committed its last step in ``last`` and was not restarted since; a member that was
    behind in ``last`` and has caught up counts as well. A replica whose connection broke in ``last`` has discarded the
    step. Every member computes the same answer.
    """
    return (
        last is not None
        and not quorum.behind
        and quorum.lineage == last.number
        and quorum.step == last.step + 1
        and quorum.members == last.members
        and dict(quorum.lives) == dict(last.lives)
    )


Rows = Mapping[int, Sequence[Mapping[str, str]]]
"""Replica -> addresses of each of its ranks, {"ring": "host:port", "fetch": "host:port"}."""


@dataclass(frozen=True)
class Question:
    """A rank's question for the quorum of its next step, with what the agreement thread needs to join that quorum.

    Attributes:
        is_sure: the replica computes the step already, as if the quorum were unchanged.
        ring_wait_s: seconds for which a ring may make no progress in the step.
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


_LEAVE_S = 2.0
_T = TypeVar("_T")


def sources(quorum: Quorum, replica: int, rank: int) -> list[int]:
    """Return the healthy replicas in the order in which a rank fetches from them, rotated to balance their load."""
    healthy = quorum.healthy
    return [healthy[(rank + replica + i) % len(healthy)] for i in range(len(healthy))]


@dataclass(frozen=True)
class LastSave:
    """The trainer's functions for the final checkpoint.

    Attributes:
        is_there: returns whether the checkpoint of a step is complete.
        write: saves the present state; collective inside the replica, and complete when it returns.
    """

    is_there: Callable[[int], bool]
    write: Callable[[], None]


class Turns:
    """Decides which replicas write the final checkpoint, over consecutive quorums in which it is not complete yet."""

    def __init__(self) -> None:
        self._healthy: tuple[int, ...] = ()
        self._asked = 0

    def is_mine(self, replica: int, healthy: Sequence[int]) -> bool:
        """Return whether ``replica`` has to write the checkpoint now.

        In the first quorum, the first of the ``healthy`` replicas has to write. With every further quorum of the same
        members, the next replica has to write, too: a replica that stays in the quorums without writing may not know
        that the run ends (a signal may have reached some replicas only). All replicas count the quorums alike.
        """
        self._asked = self._asked + 1 if tuple(healthy) == self._healthy else 0
        self._healthy = tuple(healthy)
        return replica in healthy and list(healthy).index(replica) <= self._asked


class QuorumMembership:
    """A rank's membership in quorums and their rings. Only the agreement thread uses it."""

    def __init__(self, replica: int, rank: "TrainingRank"):
        self._replica, self._rank = replica, rank
        self._last: Quorum | None = None

    def join(self, question: Question, agreed: Agreed) -> None:
        """Connect the ring to the members of the quorum, if they have changed, and start the exchange of gradients. If
        this replica cannot take part in the step, end the exchange instead.
        """
        quorum, rank = agreed.step, self._rank
        if quorum is None:
            rank.give_up(agreed.problem or "no step to do")
            return
        is_healthy = self._replica in quorum.healthy
        if question.is_last:
            self._steps_out(agreed, quorum, "this replica has done its last step")
            return
        if question.is_sure and not is_healthy:
            self._steps_out(agreed, quorum, "the others have gone on without this replica")
            return
        problem = rank.problem(quorum, question.is_sure) if is_healthy else ""
        rank.expect(question.ring_wait_s)
        if not is_same_ring(self._last, quorum):
            rank.connect(agreed, quorum)
        self._last = quorum
        if problem:
            rank.give_up(problem)
        else:
            rank.open(quorum)

    def _steps_out(self, agreed: Agreed, quorum: Quorum, reason: str) -> None:
        """Leave a quorum without contributing. The ring is connected first, so that peers see this replica close the
        connection; otherwise they would wait for it to join.
        """
        self._rank.connect(agreed, quorum)
        self._last = quorum
        self._rank.give_up(reason)


class Steps:
    """A rank's steps, from the question for a quorum to the commit. Only the training thread uses it.

    Args:
        wait_s: seconds that an update waits for replicas that fetch the state.
        limits: time limits of rings.
        goes_on: whether this life goes on from the state of the one before, which hot-swap has restored.

    Attributes:
        agreed: answer to the question of this step, None while it is not known.
        is_catching_up: whether the replica is behind, and fetches its state in this step.
    """

    def __init__(
        self,
        replica: int,
        life: int,
        has_state: bool,
        rank: "TrainingRank",
        wait_s: float,
        limits: RingLimits | None = None,
        goes_on: bool = False,
    ):
        self._replica, self._life, self._rank = replica, life, rank
        self.has_state, self.agreed, self.is_catching_up = has_state, Agreed(None, {}), False
        # _is_sure: this replica computes the next step without waiting for its quorum (see ``begins``).
        # _is_untouched: neither a fetch nor a step has written into the initial state of this process.
        self._is_sure, self._is_untouched, self._has_joined = False, not goes_on, goes_on
        # _aside: in this step a replica may be busy with something else, or slow, so the ring gets a longer time limit.
        self._aside = True  # the first step may take long on every replica
        self._suspects: tuple[int, ...] = ()
        self._is_offered = False  # whether other replicas can fetch the state of this one
        self._first_wait_s = self._wait_s = wait_s
        self._limits, self._times = limits or RingLimits(), LastDurations()
        self._began, self._said = rank.now(), ""

    @property
    def quorum(self) -> Quorum:
        """The quorum of the step under way."""
        quorum = self.agreed.quorum
        assert quorum is not None
        return quorum

    async def attempts(self, work: Callable[[], Awaitable[_T]]) -> _T | None:
        """Run ``work``, the training loop, and again after every failed step.

        Returns:
            The result of ``work``; None if the other replicas have finished the run.
        """
        if self.has_state:
            self._offer()
        failed: Retry | None = None
        while True:
            try:
                if failed is not None:
                    await self._begin_anew(failed)
                return await work()
            except Retry as retry:
                failed = retry
            except RunIsOver:
                return None

    async def begins(self) -> bool:
        """Begin a step: ask for its quorum, and return whether this replica computes the step.

        If this replica has committed the previous step as a healthy member, it does not wait for the quorum; it starts
        to compute at once, as if the quorum were unchanged. Otherwise it waits. If the quorum finds that no replica has
        a state, this replica loads a checkpoint and asks again.

        Returns:
            True: the replica computes the step. False: it is behind, and catches up in this step.

        Raises:
            RunIsOver: the other replicas have finished the run.
            SystemExit: there is no quorum for this replica.
        """
        rank = self._rank
        self._began = rank.now()
        while True:
            rank.begin_exchange()
            if self._is_sure:
                rank.plan(None)
            self._ask()
            if self._is_sure:
                return True
            await self._answer("quorum")
            quorum = self.agreed.quorum
            if quorum is None:
                raise SystemExit(f"replica {self._replica} has no quorum: {self.agreed.problem}")
            if quorum.finished:
                raise RunIsOver("the other replicas have finished")
            if not quorum.load:
                break
            await self._begin_from_checkpoint()
        self.is_catching_up = self._replica not in quorum.healthy
        if not self.is_catching_up:
            rank.plan(quorum)
        return not self.is_catching_up

    async def catching_up(self) -> None:
        """Begin to fetch the state. The trainer contributes zero gradients meanwhile."""
        self._is_untouched = False
        await self._rank.fetch(self.agreed, self.quorum, self.has_state)
        self._at_return("restore")

    async def caught_up(self) -> None:
        """End a catch-up step, before the update: wait for the fetched state, and adopt it.

        Raises:
            Retry: not all ranks of the replica could fetch their state. A state that was kept is unchanged.
        """
        await self._rank.withdraw(0.0)  # this replica's older state, which is about to be overwritten
        self._is_offered = False
        problem = await self._rank.fetched()
        if not await self._rank.all_agree(not problem):
            raise Retry(problem or "another rank of this replica could not fetch its state")
        self._rank.adopt()
        self.has_state = True

    async def vote(self) -> None:
        """Let the ranks of this replica agree that all of them have all gradients of the step, then withdraw the
        offered state, because the optimizer is about to change it.

        Raises:
            Retry: a rank does not have all gradients. Raised on all ranks.
        """
        await self._answer("quorum")
        step, quorum = self._rank.state[0] + 1, self.agreed.step
        if quorum is not None and quorum.behind and not self.is_catching_up:
            self._at_return("restore")
        problem, _ = self._rank.failure
        self._rank.at("vote", step)
        if not await self._rank.all_agree(not problem):
            if problem:
                self._rank.say(f"step {step}: {problem}", on_leader=False, on_others=True)
            raise Retry(problem or "another rank of this replica has not got all gradients")
        await self._end_offer()
        self._rank.at("optimizer", step)

    def updated(self, is_applied: bool) -> None:
        """Note that the optimizer has made the update, or skipped it: the step is committed."""
        if self.is_catching_up and not is_applied:
            self._rank.publish()
        self._rank.advance(self.quorum)

    async def committed(self) -> None:
        """End a committed step: offer the new state to replicas that are behind, and record the step."""
        rank, quorum = self._rank, self.quorum
        if quorum.behind:
            self._at_return("resume")
        if self.is_catching_up:
            await self._take_over_rng_and_buffers()
        self.has_state, self._suspects = True, ()
        self._is_sure = not self.is_catching_up
        self._offer()
        seconds = rank.now() - self._began
        rank.committed(quorum, seconds, self.is_catching_up)
        if not self.is_catching_up:
            self._times.add(seconds, rank.units)
        self.is_catching_up = False

    def saves(self, step: int, interval: int, ends: bool) -> bool:
        """Return whether this replica writes the checkpoint of ``step``. The healthy replicas take turns.

        Args:
            interval: steps between two checkpoints.
            ends: the run ends with this step; the first healthy replica then writes.
        """
        self._aside = True
        quorum = self.agreed.quorum
        healthy = quorum.healthy if quorum is not None else (self._replica,)
        turn = 0 if ends else step // interval
        is_mine = healthy[turn % len(healthy)] == self._replica
        if is_mine:
            self.goes_aside()
        return is_mine

    def goes_aside(self) -> None:
        """Announce that this replica is busy with something other than a step, so that peers wait longer for it."""
        self._aside = True
        self._rank.goes_aside()

    async def leaves(self, is_saved: Callable[[], bool] | None) -> bool:
        """Wait, after the last step, until the others have its gradients, and then until the last checkpoint is there.

        Replicas that have exited could not replace one that dies while it writes the checkpoint. So all replicas that
        have done the last step keep asking for quorums until the checkpoint is complete.

        Args:
            is_saved: returns whether the last checkpoint is complete; None: none is written.

        Returns:
            Whether this replica has to write the last checkpoint.
        """
        if not self.has_state or not self._has_joined:
            return False
        await self._rank.take_leave(_LEAVE_S)
        turns = Turns()
        while is_saved is not None and not await self._rank.all_agree(is_saved()):
            self._ask(is_last=True)
            await self._answer("the last checkpoint")
            quorum = self.agreed.quorum
            if quorum is None:
                return True
            if quorum.finished or self._replica not in quorum.healthy:  # another has written it, or the run goes on
                return False
            if turns.is_mine(self._replica, quorum.healthy):
                return True
        return False

    def report(self) -> Report:
        """Return the report of this rank's state, for the quorum server."""
        step, lineage = self._rank.state if self.has_state else (0, -1)
        step_s = self._times.of(self._rank.units)
        return Report(self._replica, self._life, step, lineage, self._suspects, step_s)

    # --- parts of a step ----------------------------------------------------------------------------------------------

    def _ask(self, is_last: bool = False) -> None:
        report = self.report()
        wait_s = self._limits.wait(report.step_s, is_aside=self._aside)
        self._rank.ask(Question(report, self._is_sure, wait_s, is_last))

    async def _answer(self, why: str) -> None:
        self.agreed = await self._rank.answer(why)
        self._has_joined |= self.agreed.step is not None

    def _at_return(self, phase: str) -> None:
        """Inject the faults that are planned for this phase of a replica's return."""
        self._rank.at(phase, self.quorum.step + 1)

    async def _begin_from_checkpoint(self) -> None:
        if not await self._rank.load() and not self._is_untouched:
            raise SystemExit("no replica has a state, there is no checkpoint: this worker starts anew to begin the run")
        self.has_state = True
        self._offer()

    def _offer(self) -> None:
        self._rank.offer()
        self._is_offered = True

    async def _end_offer(self) -> None:
        """Stop offering the state. If a replica is fetching it, wait for that, for a limited time; if that was too
        short, the next wait is twice as long."""
        is_wanted = bool(self.quorum.behind)
        if is_wanted:
            self.goes_aside()
        was_cut = await self._rank.withdraw(self._wait_s if is_wanted else 0.0)
        self._is_offered = False
        self._wait_s = fetch_wait(self._wait_s, self._first_wait_s, is_wanted=is_wanted, was_cut=was_cut)
        self._aside = is_wanted  # in the next step, other members of the ring may still be waiting for a fetch

    async def _take_over_rng_and_buffers(self) -> None:
        """Take over what a forward pass changes, after the commit; the step stays committed if that fails."""
        problem = await self._rank.fetch_rng_and_buffers(self.agreed, self.quorum)
        if await self._rank.all_agree(not problem):
            self._rank.adopt_rng_and_buffers()
            return
        reason = problem or "another rank of this replica could not have it"
        step = self._rank.state[0]
        self._rank.say(f"step {step} goes on with this replica's own generators and buffers: {reason}", on_others=True)

    async def _begin_anew(self, retry: Retry) -> None:
        """Discard the failed attempt at a step and restore the state before it. Called on all ranks of the replica."""
        rank, quorum = self._rank, self.agreed.quorum
        self._is_sure = False
        self._suspects = await rank.suspects(rank.failure[1], () if quorum is None else quorum.members)
        said = f"step {rank.state[0] + 1} is done anew: {retry}"
        if said != self._said:
            rank.say(said)
        self._said = said
        if not self.is_catching_up:
            rank.failed()
        rank.abandon()
        was_catching_up, self.is_catching_up = self.is_catching_up, False
        if self._times.of(rank.units) is not None:
            self._aside = False  # the quorum has waited for who was busy, so the ring of the next attempt need not
        if not await rank.all_agree(not rank.is_stale):
            rank.say(f"replica {self._replica} drops its state, which is not that of the others")
            rank.drop()
            self.has_state = self._is_untouched = self._is_offered = False
        if self.has_state:
            if was_catching_up:
                rank.publish()
            rank.restore()
            if was_catching_up or not self._is_offered:
                self._offer()
