"""A model replica: its agent, its lives, and the ranks of a life, which execute the steps of FT-HSDP, section 4."""

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from ft.base.errors import FtError
from ft.job.quorum import client as clients
from ft.job.quorum.values import NoQuorum, Quorum, Report
from ft.lab.simulate.hsdp_protocol.held import NOTHING, Contribution, Held, after, spoiled
from ft.lab.simulate.hsdp_protocol.link import Link

if TYPE_CHECKING:
    from ft.lab.simulate.hsdp_protocol.world import World

NOT_NEEDED, UNDER_WAY, DONE, REFUSED = "not needed", "under way", "done", "refused"
_SPREAD_S, _NOTICED_S, _LOAD_S, _POLL_S = (0.0005, 0.004), (0.01, 0.05), (0.02, 0.1), 0.01


class Agent:
    """Starts the lives of a replica and detects their end.

    Attributes:
        life: the current life, None while the replica is rebuilt.
        has_ended: the run has finished for this replica.
    """

    def __init__(self, world: "World", replica: int):
        self.world, self.replica = world, replica
        self.life: Life | None = None
        self.has_ended = False
        self._number = -1

    def build(self, seconds: float) -> None:
        self._number += 1
        coming = Life(self, self._number)
        self.world.time.after(seconds * self.world.rng.random(), coming.client.arriving)
        self.world.time.after(seconds, self._start, coming)

    def _start(self, life: "Life") -> None:
        self.life = life
        self.world.note("replica {}: life {} is there", self.replica, life.number)
        life.start()

    def lost(self, life: "Life", reason: str) -> None:
        """Handle the end of a rank: after a delay, end the other ranks of this life and build a new one."""
        if self.life is not life or life.is_over:
            return
        self.world.time.after(self.world.rng.uniform(*_NOTICED_S), self._end, life, reason)

    def _end(self, life: "Life", reason: str) -> None:
        if self.life is not life:
            return
        life.end()
        self.life = None
        self.world.note("replica {}: life {} is over: {}", self.replica, life.number, reason)
        self.build(self.world.shape.build_s * self.world.rng.uniform(0.7, 1.3))


class Life:
    """One incarnation of a replica's worker processes.

    Attributes:
        quorum: the last quorum that its leader received.
        suspects: replicas to name in the next report, because rings could not reach them.
        aside_since: since when it has been doing something other than steps, None while it executes steps.
    """

    def __init__(self, agent: Agent, number: int):
        self.agent, self.world, self.number = agent, agent.world, number
        self.is_over = False
        self.ranks = [Rank(self, index) for index in range(self.world.shape.ranks)]
        self.quorum: Quorum | None = None
        self.suspects: set[int] = set()
        self.aside_since: float | None = None
        self._votes: dict[int, tuple[bool, bool]] = {}
        self._ready: set[int] = set()
        with _links(self.world, agent.replica, self.ranks[0]):
            self.client = clients.QuorumClient(Path("."), agent.replica, number, "token", self.world.limits)

    def start(self) -> None:
        self.client.hello([{"ring": "", "fetch": ""}])
        self.ask()

    def end(self) -> None:
        self.is_over = True
        for rank in self.ranks:
            rank.dies()
        self.client.close()

    def ask(self) -> None:
        held, step_s = self.ranks[0].held, self.world.shape.step_s
        finished = self.world.last_step is not None and held.step >= self.world.last_step
        report = Report(
            self.agent.replica, self.number, *held.name, tuple(sorted(self.suspects)), step_s, finished=finished
        )
        self.aside_since = None
        self.suspects.clear()
        self._votes.clear()
        self._ready.clear()
        self.world.note("replica {}: reports {}", self.agent.replica, _brief(report))
        self.client.ask(report).add_done_callback(lambda future: self.ranks[0].do(0.0005, self._told, future))

    def _told(self, future: "Future[Quorum]") -> None:
        error = future.exception()
        if isinstance(error, NoQuorum | FtError):
            self.agent.lost(self, str(error))
            return
        quorum = self.quorum = future.result()
        if quorum.finished:
            self.agent.has_ended = True
            self.world.note("replica {}: the run is over", self.agent.replica)
            return
        start = self.world.checkpoint if quorum.load else None
        for rank in self.ranks:
            rank.do(self.world.rng.uniform(*_SPREAD_S), rank.begin, quorum, start)

    def votes(self, rank: "Rank", quorum: Quorum, ring_ok: bool, has_state: bool) -> None:
        """Collect a rank's vote; when all have voted, announce the minimum of both votes to all ranks."""
        self._votes[rank.index] = (ring_ok, has_state)
        if quorum.number != self.quorum.number or len(self._votes) < len(self.ranks):
            return
        outcome = [all(votes) for votes in zip(*self._votes.values(), strict=True)]
        for each in self.ranks:
            each.do(self.world.rng.uniform(*_SPREAD_S), each.decided, quorum, *outcome)

    def is_ready(self, rank: "Rank") -> None:
        """Note that the rank is done with the step, successfully or not; when all ranks are, continue."""
        self._ready.add(rank.index)
        if len(self._ready) == len(self.ranks):
            self._votes.clear()
            self.world.checks.replica_at_rest(self)
            if self._saves():
                self._go_aside()
            elif self.world.habits.asks_again or self.ranks[0].has_done_it or self.quorum.load:
                self.ask()
            else:
                self._ready.clear()
                for each in self.ranks:
                    each.do(self.world.rng.uniform(*_SPREAD_S), each.begin, self.quorum, None)

    def _saves(self) -> bool:
        """Whether this replica writes the checkpoint of the step that it has just committed."""
        step, every = self.ranks[0].held.step, self.world.shape.save_steps
        is_due = every > 0 and step > 0 and step % every == 0 and self.ranks[0].has_done_it
        return is_due and self.quorum.healthy[step // every % len(self.quorum.healthy)] == self.agent.replica

    def _go_aside(self) -> None:
        self.aside_since = self.world.time.now
        self.world.note("replica {}: saves", self.agent.replica)
        self.client.aside()
        self.ranks[0].do(self.world.shape.save_s, self.ask)


class Rank:
    """One worker of a replica.

    Attributes:
        held: its state.
        awake_at: it is paused until then.
        fetchers: ranks that are reading its state.
        has_done_it: the last step was committed.
    """

    def __init__(self, life: Life, index: int):
        self.life, self.world, self.index, self.replica = life, life.world, index, life.agent.replica
        self.held, self.is_alive, self.awake_at = NOTHING, True, 0.0
        self.fetchers: set[Rank] = set()
        self.has_done_it = False
        self._quorum: Quorum | None = None
        self._total: tuple[Contribution, ...] | None = None
        self._has_outcome = self._has_voted = self._is_behind = False
        self._fetch, self._fetched_state = NOT_NEEDED, None
        self._own_count = 0

    def do(self, seconds: float, action: Callable[..., None], *arguments: Any) -> None:
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

    # --- a step ------------------------------------------------------------------------------------------------------

    def begin(self, quorum: Quorum, start: Held | None) -> None:
        self._quorum, self._total, self.has_done_it = quorum, None, False
        self._has_outcome = self._has_voted = False
        self._fetch, self._is_behind, self._fetched_state = NOT_NEEDED, self.replica in quorum.behind, None
        if quorum.load:
            self.do(self.world.rng.uniform(*_LOAD_S), self._loaded, start)
            return
        if self._is_behind:
            self._fetch = UNDER_WAY
            if not self.world.shape.aside:
                self.held = NOTHING if self.world.habits.owns_up else spoiled(self.held, quorum.number)
            self._fetch_from([*quorum.healthy], quorum)
            self.do(self.world.rng.uniform(*_SPREAD_S), self._join, quorum)
        else:
            self.world.checks.is_healthy(self, quorum)
            self.do(self.world.compute_s(self.replica), self._join, quorum)

    def _loaded(self, start: Held) -> None:
        self.held = start
        self._own_count = start.positions[self.replica]
        self.life.is_ready(self)

    def _join(self, quorum: Quorum) -> None:
        if quorum.number != self._quorum.number:
            return
        trains = not self._is_behind or not self.world.habits.zeros
        given = (self.replica, self._position()) if trains else None
        self.world.ring(quorum, self.index).join(self, given)

    def _position(self) -> int:
        if self.world.habits.follows_positions:
            return self.held.positions[self.replica] if self.held.positions else 0
        return self._own_count

    def ring_ended(self, quorum: Quorum, total: tuple[Contribution, ...] | None, suspect: int | None) -> None:
        if quorum.number != self._quorum.number or self._has_outcome:
            return
        self._total, self._has_outcome = total, True
        if suspect is not None:
            self.life.suspects.add(suspect)
        self._vote()

    def _vote(self) -> None:
        if not self._has_outcome or self._has_voted:
            return
        ring_ok, waits = self._total is not None, self.world.habits.waits_for_fetch
        if ring_ok and self._fetch == UNDER_WAY and waits:
            return
        self._has_voted = True
        self.life.votes(self, self._quorum, ring_ok, self._fetch in (NOT_NEEDED, DONE) or not waits)

    def decided(self, quorum: Quorum, ring_ok: bool, has_state: bool) -> None:
        if quorum.number != self._quorum.number:
            return
        self.world.at("decided", self)
        habits = self.world.habits
        if self._fetched_state is not None and (has_state or not habits.votes_on_fetch):
            self.held = self._fetched_state
            self.world.checks.adopted(self)
        own_vote = self._total is not None and self._fetch in (NOT_NEEDED, DONE)
        is_rebel = not habits.votes and self.index == self.world.shape.ranks - 1
        if (ring_ok and has_state) or (own_vote and is_rebel):
            self._commit_when_read(self.world.time.now + self.world.shape.let_finish_s)
        else:
            self._done(False)

    def _commit_when_read(self, latest: float) -> None:
        waits = self.fetchers and self.world.habits.lets_finish and self.world.habits.withdraws
        if waits and self.world.time.now < latest:
            self.do(_POLL_S, self._commit_when_read, latest)
            return
        habits, quorum = self.world.habits, self._quorum
        self.world.checks.about_to_commit(self, quorum)
        if habits.withdraws:
            self.fetchers.clear()
        counted = quorum.healthy if habits.advances_healthy_only else quorum.members
        number = quorum.number if habits.names_its_commits else self.held.lineage
        before, self.held = self.held, after(self.held, number, self._total, counted)
        self._own_count += 1
        self.world.checks.committed(self, before, quorum, self._total)
        self._done(True)

    def _done(self, has_done_it: bool) -> None:
        self.has_done_it = has_done_it
        self.do(self.world.rng.uniform(*_SPREAD_S), self.life.is_ready, self)

    # --- catching up -------------------------------------------------------------------------------------------------

    def _fetch_from(self, sources: list[int], quorum: Quorum) -> None:
        if quorum.number != self._quorum.number:
            return
        if not sources:
            self._fetched(quorum, None)
            return
        self.world.at("fetch", self)
        turn = (self.replica + self.index) % len(sources)
        source = self.world.rank_of(sources[turn], quorum.lives[sources[turn]], self.index)
        rest = sources[:turn] + sources[turn + 1 :]
        if source is None or self.world.is_cut(self.replica, source.replica):
            self.do(0.02, self._fetch_from, rest, quorum)
            return
        source.fetchers.add(self)
        self.do(self.world.shape.fetch_s * self.world.rng.uniform(0.5, 1.5), self._read, source, rest, quorum)

    def _read(self, source: "Rank", rest: list[int], quorum: Quorum) -> None:
        is_served = self in source.fetchers
        source.fetchers.discard(self)
        if quorum.number != self._quorum.number:
            return
        asked = (quorum.step, quorum.lineage)
        is_there = source.is_alive and source.awake_at <= self.world.time.now
        if is_served and is_there and not self.world.is_cut(self.replica, source.replica):
            if source.held.name == asked:
                self._fetched(quorum, source.held)
                return
            if not self.world.habits.withdraws:
                torn = spoiled(source.held, quorum.number)
                self._fetched(quorum, Held(*asked, torn.chain, torn.positions))
                return
        self._fetch_from(rest, quorum)

    def _fetched(self, quorum: Quorum, found: Held | None) -> None:
        if self._has_voted:
            return
        self._fetch, self._fetched_state = REFUSED if found is None else DONE, found
        if found is not None:
            self.world.note("replica {} rank {}: has fetched {}", self.replica, self.index, found.name)
        if self._has_outcome:
            self._vote()


def _links(world: "World", replica: int, rank: Rank | None):
    """Replace the link of quorum clients by a simulated one, for the duration of the context."""
    return mock.patch.object(clients, "Link", lambda *arguments: Link(world, replica, rank, *arguments))


def _brief(report: Report) -> str:
    suspects = f", suspects {list(report.suspects)}" if report.suspects else ""
    return f"({report.next_step}, {report.lineage}){suspects}{', finished' if report.finished else ''}"
