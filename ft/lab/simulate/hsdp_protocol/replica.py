"""Model of a replica for ``ft simulate hsdp-protocol``: its agent, its lives and their ranks (FT-HSDP, section 4).

A life is one set of the replica's worker processes; its rank 0 is the leader. In each step, the leader reports to the
quorum server and gets a quorum, the set of replicas that execute the step together. Each rank all-reduces its gradients
with the ranks of the same index in the other members (a ring). A replica that is behind fetches the state of a healthy
replica meanwhile. The ranks of the replica then vote, and commit the step only if all of them can.
"""

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
"""States of the fetch of another replica's state."""
_SPREAD_S, _NOTICED_S, _LOAD_S, _POLL_S = (0.0005, 0.004), (0.01, 0.05), (0.02, 0.1), 0.01
"""Durations in virtual seconds, the first three as (least, most): messages between the ranks of a replica, detection of
a dead rank, loading a checkpoint, polling.
"""


class Agent:
    """The supervisor of a replica: starts its lives, one after the other, and detects their end.

    Attributes:
        life: the current life, None while the replica is rebuilt.
        has_ended: whether the run has finished for this replica.
    """

    def __init__(self, world: "World", replica: int):
        self.world, self.replica = world, replica
        self.life: Life | None = None
        self.has_ended = False
        self._number = -1

    def build(self, seconds: float) -> None:
        """Start the next life, which takes ``seconds`` virtual seconds."""
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
    """One set of a replica's worker processes.

    Attributes:
        number: number of the life, from 0.
        is_over: whether the agent has ended the processes.
        ranks: the worker processes; rank 0 is the leader.
        quorum: the last quorum that the leader received.
        suspects: replicas to name in the next report, because rings could not reach them.
        aside_since: virtual time in seconds at which the replica began to write a checkpoint, None while it executes
            steps.
        client: the production client of the quorum server.
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
        """Report the replica's state to the quorum server, and ask for the quorum of the next step."""
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
        """Collect a rank's votes; when all ranks have voted, announce the minimum of both votes to all ranks.

        Args:
            rank: the rank that votes.
            quorum: quorum of the step.
            ring_ok: whether the rank's ring has completed.
            has_state: whether the rank has the state that precedes the step.
        """
        self._votes[rank.index] = (ring_ok, has_state)
        if quorum.number != self.quorum.number or len(self._votes) < len(self.ranks):
            return
        outcome = [all(votes) for votes in zip(*self._votes.values(), strict=True)]
        for each in self.ranks:
            each.do(self.world.rng.uniform(*_SPREAD_S), each.decided, quorum, *outcome)

    def is_ready(self, rank: "Rank") -> None:
        """Note that a rank has ended the step, successfully or not. When all have, save or begin the next step."""
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
        """Return whether this replica writes the checkpoint of the step that it has just committed."""
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
        index: number of the rank within its replica.
        held: training state of the rank.
        is_alive: False once the process has ended.
        awake_at: virtual time in seconds until which the process is paused.
        fetchers: ranks of other replicas that are reading this rank's state.
        has_done_it: whether the last step was committed.
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

    # --- a step ------------------------------------------------------------------------------------------------------

    def begin(self, quorum: Quorum, start: Held | None) -> None:
        """Begin a step: load the checkpoint ``start``, or fetch the state if behind, or compute gradients."""
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
        """Note the outcome of the gradient all-reduce.

        Args:
            quorum: quorum of the step.
            total: contributions in the reduced gradient, None if the all-reduce has failed.
            suspect: replica that may have caused the failure, None if unknown.
        """
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
        """Act on the result of the vote: adopt a fetched state, and commit or abandon the step."""
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
        """Commit the step once no rank is reading this rank's state any more, at time ``latest`` at the latest."""
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
        """Fetch the state from one of the replicas ``sources``; try the others if that fails."""
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
    """Replace the network link of the production client by a simulated link, for the duration of the context."""
    return mock.patch.object(clients, "Link", lambda *arguments: Link(world, replica, rank, *arguments))


def _brief(report: Report) -> str:
    suspects = f", suspects {list(report.suspects)}" if report.suspects else ""
    return f"({report.next_step}, {report.lineage}){suspects}{', finished' if report.finished else ''}"
