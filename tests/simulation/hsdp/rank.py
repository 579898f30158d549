"""A simulated rank of a replica, around the production protocol (``ft.systems.hsdp.protocol``).

It has the methods of ``ft.systems.hsdp.rank.TrainingRank``, with models of the trainer, the network and the checkpoint,
in virtual time. A quorum is the set of replicas that execute a step together; a life is one set of a replica's worker
processes, whose rank 0 is the leader.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ft.job.quorum.values import Quorum
from ft.systems.hsdp.exchange import TableComparison
from ft.systems.hsdp.protocol import Agreed, Question, QuorumMembership, Retry, Steps, sources
from tests.simulation.engine import Signal, Thread, pause
from tests.simulation.hsdp.held import NOTHING, Contribution, Held, after, first, spoiled
from tests.simulation.hsdp.shape import RING_LIMITS

if TYPE_CHECKING:
    from tests.simulation.hsdp.replica import Life
    from tests.simulation.hsdp.ring import Ring

_LOAD_S, _POLL_S, _BEGIN_S, _SKIPPED = (0.02, 0.1), 0.01, 0.005, 16
"""Virtual seconds: loading a checkpoint (least, most), polling, registering a fetch; the optimizer skips about one of
this many updates."""


class Rank:
    """One worker of a replica.

    Attributes:
        index: number of the rank within its replica.
        held: the optimizer's state and the position of the rank.
        model: content of the state that the model's parameters were made of.
        is_wrong: whether the model was changed by anything but a step.
        snapshots: the last two committed states.
        is_alive: False once the process has ended.
        awake_at: virtual time in seconds until which the process is paused.
        attempt: number of attempts at steps.
        offered: state that other replicas may fetch, None if there is none.
        fetchers: ranks of other replicas that are reading the offered state.
        ring: connections to the other replicas, None before the first quorum.
    """

    def __init__(self, life: "Life", index: int):
        self.life, self.world, self.index, self.replica = life, life.world, index, life.agent.replica
        comes_back = life.number > 0 and life.restored is None
        self.held = NOTHING if comes_back else life.restored or first(self.world.shape)
        self.snapshots: list[Held] = []
        self.model, self.is_alive, self.awake_at, self.attempt = self.held.chain, True, 0.0, 0
        self.is_wrong = False
        self.offered: Held | None = None
        self.fetchers: set[Rank] = set()
        self.ring: Ring | None = None
        self._loader, self._start = 0 if comes_back else self.held.positions[self.replica], self.held
        self._undid: set[int] = set()
        self._fetched: Held | None = None
        self._fetch_done = Signal()
        self._is_closing = False
        self._limit_s = 0.0
        self._asked: list[tuple[Question, Signal]] = []
        self._bell, self._told = Signal(), Signal()
        self.begin_exchange()
        self.steps = Steps(
            self.replica,
            life.number,
            not comes_back,
            self,
            self.world.shape.let_finish_s,
            RING_LIMITS,
            life.in_place,
        )

    def start(self) -> None:
        for live in (self._train, self._agree):
            Thread(live, self.do, self._ends_itself).poke()

    def _ends_itself(self, reason: str | int) -> None:
        if reason == 0:
            return
        self.world.note("replica {} rank {}: ends: {}", self.replica, self.index, reason)
        self.world.checks.ends_itself(self, reason)
        self.life.has_given_up = True
        self.life.agent.lost(self.life, reason)

    def do(self, seconds: float, action: Callable[..., None], *arguments: Any) -> None:
        """Run an action in this process after ``seconds``, later if the process is paused, never if it has ended."""
        self.world.time.after(seconds, self._act, action, arguments)

    def _act(self, action: Callable[..., None], arguments: tuple) -> None:
        if not self.is_alive:
            return
        if (rest := self.awake_at - self.world.time.now) > 0:
            self.world.time.after(rest + 1e-6, self._act, action, arguments)
        else:
            action(*arguments)

    def dies(self) -> None:
        if self.is_alive:
            self.is_alive = False
            self.world.rank_gone(self)

    # --- the trainer --------------------------------------------------------------------------------------------------

    async def _train(self) -> None:
        """Train to the end of the run, as ``ft.systems.hsdp.replica_manager`` and the trainer's loop do."""
        steps = self.steps
        await steps.attempts(self._loop)
        self.world.at("last", self)
        await pause(0.0)
        if await steps.leaves(lambda: self.world.checkpoint.step >= self.held.step):
            await self._save()
        await self.life.finished(self)

    async def _loop(self) -> None:
        steps, shape = self.steps, self.world.shape
        while self.world.last_step is None or self.held.step < self.world.last_step:
            computes = await steps.begins()
            self.life.agent.repaired(self.life)
            if computes:
                self.world.at("begins", self)
                block, self._loader = self._loader, self._loader + 1
                await pause(self.world.compute_s(self.replica))
                await self._reduce((self.replica, block))
            else:
                await steps.catching_up()
                await self._reduce(None)
                await steps.caught_up()
            await steps.vote()
            self.world.at("decided", self)
            await pause(0.0)
            before = self.held, self.model
            self._update()
            if self._finds_wrong():
                self.held, self.model = before
                raise Retry(f"step {self.held.step + 1} was computed wrongly after its gradients were sent")
            is_due = shape.save_steps > 0 and self.held.step % shape.save_steps == 0
            if is_due and steps.saves(self.held.step, shape.save_steps, ends=False):
                await self._save()
            await steps.committed()
            self.world.checks.at_rest(self)

    def _finds_wrong(self) -> bool:
        """Return whether this replica finds the present step wrong, as all of its ranks do, once."""
        step = self.held.step
        is_wrong = step in self.life.undone - self._undid and not self.steps.is_catching_up
        self._undid.add(step)
        return is_wrong

    def _update(self) -> None:
        """Make the optimizer's update. It skips some, as for an overflow; the step is committed all the same."""
        quorum, before = self.steps.quorum, self.held
        self.world.checks.about_to_commit(self, quorum)
        chain = after(before, self._total)
        is_applied = chain % _SKIPPED > 0
        if is_applied or self.model == before.chain:
            self.model = chain
        self.held = replace(before, chain=chain)
        self.steps.updated(is_applied)
        self.world.checks.committed(self, before, quorum, self._total)

    async def _save(self) -> None:
        self.steps.goes_aside()
        if self.index == 0:
            self.life.aside_since = self.world.time.now
            self.world.note("replica {}: saves", self.replica)
        await pause(self.world.shape.save_s)
        self.world.checks.saved_at = self.world.time.now
        if self.index == 0 and self.held.name > self.world.checkpoint.name:
            self.world.checkpoint = self.held

    # --- as ft.systems.hsdp.rank.TrainingRank -------------------------------------------------------------------------

    @property
    def state(self) -> tuple[int, int]:
        return self.held.name

    units = 1.0

    @property
    def failure(self) -> tuple[str, int | None]:
        return (self._problem, self._suspect)

    def now(self) -> float:
        return self.world.time.now

    def at(self, phase: str, step: int) -> None:
        """Do nothing: the faults are scheduled by the world."""

    def say(self, line: str, *, on_leader: bool = True, on_others: bool = False) -> None:
        if on_others if self.index else on_leader:
            self.world.note("replica {} rank {}: {}", self.replica, self.index, line)

    def goes_aside(self) -> None:
        if self.index == 0:
            self.life.client.aside()

    def ask(self, question: Question) -> None:
        self._told = Signal()
        self._asked.append((question, self._told))
        self._bell.set()

    async def answer(self, why: str) -> Agreed:
        return await self._told

    async def all_agree(self, is_so: bool) -> bool:
        return all(await self.life.votes.gather(self.index, is_so))

    async def suspects(self, own: int | None, members: Sequence[int]) -> tuple[int, ...]:
        found = await self.life.votes.gather(self.index, own)
        return tuple(sorted({members[each] for each in found if each is not None and each < len(members)}))

    def begin_exchange(self) -> None:
        self.attempt += 1
        self._problem, self._suspect = "", None
        self._is_open = self._is_ready = False
        self._given: Contribution | None = None
        self._total: tuple[Contribution, ...] = ()
        self._exchanged = Signal()
        self.is_stale = False

    async def take_leave(self, limit_s: float) -> None:
        await pause(min(limit_s, 0.05))

    def plan(self, quorum: Quorum | None) -> None:
        """Do nothing: each replica computes its own block."""

    def failed(self) -> None:
        """Do nothing: the whole attempt is discarded."""

    def advance(self, quorum: Quorum) -> None:
        positions = list(self.held.positions)
        for replica in quorum.healthy:
            positions[replica] += 1
        self.held = Held(self.held.step + 1, quorum.number, self.held.chain, tuple(positions))

    def committed(self, quorum: Quorum, seconds: float, caught_up: bool) -> None:
        """Do nothing: the world's checks record the steps."""

    # --- the state ----------------------------------------------------------------------------------------------------

    async def load(self) -> bool:
        await pause(self.world.rng.uniform(*_LOAD_S))
        self.held, self.is_wrong = self.world.checkpoint, False
        self.model, self._loader = self.held.chain, self.held.positions[self.replica]
        self.world.note("replica {} rank {}: loads {}", self.replica, self.index, self.held.name)
        return self.held.step > 0

    def offer(self) -> None:
        self.offered = self._start = self.held
        if self.held not in self.snapshots:
            self.snapshots = [*self.snapshots[-1:], self.held]
        self._is_closing = False

    async def withdraw(self, wait_s: float) -> bool:
        latest, self._is_closing = self.world.time.now + wait_s, True
        while self.fetchers and self.world.time.now < latest:
            await pause(_POLL_S)
        was_cut, self.offered = bool(self.fetchers), None
        self.fetchers.clear()
        return was_cut

    async def fetch(self, agreed: Agreed, quorum: Quorum, keeps_state: bool) -> None:
        self.world.checks.connects(self, agreed, quorum, "fetch")
        self._fetched, self._fetch_done = None, Signal()
        if not keeps_state:
            self.held = spoiled(self.held, quorum.number)
        self.world.at("fetch", self)
        self._fetch_from(sources(quorum, self.replica, self.index), quorum, self.attempt)
        await pause(_BEGIN_S)

    def _fetch_from(self, replicas: list[int], quorum: Quorum, attempt: int) -> None:
        if attempt != self.attempt:
            return
        if not replicas:
            self._fetch_done.set("nobody has the state")
            return
        source, rest = self.world.rank_of(replicas[0], quorum.lives[replicas[0]], self.index), replicas[1:]
        name = (quorum.step, quorum.lineage)
        is_there = source is not None and not self.world.is_cut(self.replica, source.replica)
        if not is_there or source._is_closing or source.offered is None or source.offered.name != name:
            self.do(0.02, self._fetch_from, rest, quorum, attempt)
            return
        source.fetchers.add(self)
        seconds = self.world.shape.fetch_s * self.world.rng.uniform(0.5, 1.5)
        self.do(seconds, self._read, source, source.offered, rest, quorum, attempt)

    def _read(self, source: "Rank", offered: Held, rest: list[int], quorum: Quorum, attempt: int) -> None:
        is_served = self in source.fetchers and source.is_alive and source.awake_at <= self.world.time.now
        source.fetchers.discard(self)
        if attempt != self.attempt or not is_served or self.world.is_cut(self.replica, source.replica):
            self._fetch_from(rest, quorum, attempt)
            return
        is_whole = source.held.chain == offered.chain
        self._fetched = offered if is_whole else spoiled(offered, quorum.number)
        self.world.note("replica {} rank {}: has fetched {}", self.replica, self.index, offered.name)
        self._fetch_done.set("")

    async def fetched(self) -> str:
        return await self._fetch_done

    def adopt(self) -> None:
        self.held = self._start = self._fetched
        self.is_wrong = False
        self._loader = self.held.positions[self.replica]
        self.world.checks.adopted(self)

    async def fetch_rng_and_buffers(self, agreed: Agreed, quorum: Quorum) -> str:
        return ""

    def adopt_rng_and_buffers(self) -> None:
        """Do nothing: the model has no forward pass that changes the state."""

    def drop(self) -> None:
        self.held, self.is_wrong, self.offered = NOTHING, False, None
        self.snapshots = []
        self.fetchers.clear()

    def abandon(self) -> None:
        """Do nothing: gradients of the next attempt replace those of this one."""

    def restore(self) -> None:
        self._loader = self._start.positions[self.replica]

    def publish(self) -> None:
        self.model = self.held.chain

    # --- the exchange, as the agreement thread uses it ----------------------------------------------------------------

    def give_up(self, problem: str) -> None:
        self._problem = self._problem or problem
        if self.ring is not None:
            self.ring.leaves(self.replica)
        self._exchanged.set()

    def expect(self, limit_s: float) -> None:
        self._limit_s = limit_s

    def connect(self, agreed: Agreed, quorum: Quorum) -> None:
        self.world.checks.connects(self, agreed, quorum, "ring")
        if self.ring is not None:
            self.ring.leaves(self.replica)
        self.ring = self.world.ring(quorum, self.index)

    def problem(self, quorum: Quorum, is_sure: bool) -> str:
        return ""

    def open(self, quorum: Quorum) -> None:
        if self.replica in quorum.healthy:
            self.world.checks.is_healthy(self, quorum)
        self._is_open = True
        self._go_on()

    async def _reduce(self, given: Contribution | None) -> None:
        """Give gradients, None: zeros, and wait until they are exchanged or the exchange has failed."""
        self._given, self._is_ready = given, True
        self._go_on()
        await self._exchanged

    def _go_on(self) -> None:
        if self._is_open and self._is_ready and not self._problem:
            self.ring.all_reduce(self, self._given, self._limit_s)

    def models_differ(self, attempt: int, found: TableComparison) -> None:
        """Note that the members of an all-reduce have different models."""
        if attempt == self.attempt and not self._exchanged.is_set:
            self._problem, self.is_stale = found.problem, found.is_stale
            self._exchanged.set()

    def ring_ended(self, attempt: int, total: tuple[Contribution, ...] | None, suspect: int | None) -> None:
        """Note the outcome of an all-reduce."""
        if attempt != self.attempt or self._exchanged.is_set:
            return
        if total is None:
            self._problem = "the ring is broken"
            self._suspect = None if suspect is None else self.ring.quorum.members.index(suspect)
        else:
            self._total = total
        self._exchanged.set()

    # --- the agreement thread -----------------------------------------------------------------------------------------

    async def _agree(self) -> None:
        """Get the quorums for which the training thread asks, as ``ft.systems.hsdp.agreement`` does."""
        membership = QuorumMembership(self.replica, self)
        while True:
            while not self._asked:
                self._bell = Signal()
                await self._bell
            question, told = self._asked.pop(0)
            answer = await self.life.asks(question.report) if self.index == 0 else None
            agreed = await self.life.answers.broadcast(self.index, answer)
            membership.join(question, agreed)
            told.set(agreed)
