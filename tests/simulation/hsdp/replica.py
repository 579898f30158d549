"""Simulated replicas: their agents and lives (FT-HSDP, section 4).

A life is one set of the replica's worker processes; its rank 0 is the leader. Each rank runs the production protocol
(:mod:`tests.simulation.hsdp.rank`), and the leader the production client of the quorum server. The agent is
the supervisor of a replica.
"""

from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from ft.base.errors import FtError
from ft.job.quorum import client as clients
from ft.job.quorum import values
from ft.job.quorum.values import Quorum, Report
from ft.systems.hsdp.protocol import Agreed
from tests.simulation.engine import Signal, pause
from tests.simulation.hsdp.held import Held
from tests.simulation.hsdp.rank import Rank
from tests.simulation.hsdp.ring import address_row
from tests.simulation.hsdp.server import Link

if TYPE_CHECKING:
    from tests.simulation.hsdp.world import World

_NOTICED_S, _CLOSING_S, _HANDOVER_S = (0.01, 0.05), (0.005, 0.05), 0.0005
"""Durations in virtual seconds, the first two as (least, most): detection of a dead rank, the end of the other ranks,
and the handover of the quorum from the client to the agreement thread.
"""
_SPREAD_S = (0.0005, 0.004)
"""Virtual seconds (least, most) of a message between the ranks of a replica."""
_REPAIRED = 0.3
"""Duration of the replacement of a worker in place, as a share of that of a new life."""


class Agent:
    """The supervisor of a replica: starts its lives, one after the other, and detects their end.

    Attributes:
        life: the current life, None while the replica is rebuilt.
    """

    def __init__(self, world: "World", replica: int):
        self.world, self.replica = world, replica
        self.life: Life | None = None
        self._number = -1
        self._notice: clients.ReplicaNotice | None = None

    def build(self, seconds: float, restored: Held | None = None, *, in_place: bool = False) -> None:
        """Start the next life in so many virtual seconds, with the state ``restored``; ``in_place``: only lost workers
        are replaced.
        """
        self._number += 1
        coming = Life(self, self._number, restored, in_place=in_place)
        if not in_place:
            self.world.time.after(seconds * self.world.rng.random(), coming.client.arriving)
        self.world.time.after(seconds, self._start, coming)

    def _start(self, life: "Life") -> None:
        self.life = life
        self.world.note("replica {}: life {} is there", self.replica, life.number)
        life.start()

    def lost(self, life: "Life", reason: str) -> None:
        """Handle the end of a rank: after a delay, end the other ranks of this life, and build a new one."""
        if self.life is life and not life.is_over:
            self.world.time.after(self.world.rng.uniform(*_NOTICED_S), self._close, life, reason)

    def _close(self, life: "Life", reason: str) -> None:
        if self.life is life and not life.is_closing:
            life.is_repairing = self.world.repairing.random() < self.world.shape.mends and not life.has_given_up
            if life.is_repairing and self._notice is None and any(rank.is_alive for rank in life.ranks[:2]):
                with _links(self.world, self.replica, None):
                    self._notice = clients.ReplicaNotice(Path("."), self.replica, life.number, "token", clients.REPAIRS)
            life.close(reason)
            self.world.time.after(self.world.rng.uniform(*_CLOSING_S), self._end, life, reason)

    def _end(self, life: "Life", reason: str) -> None:
        if self.life is not life:
            return
        life.end()
        self.life = None
        self.world.note("replica {}: life {} is over: {}", self.replica, life.number, reason)
        restored = self._restored(life) if life.is_repairing else None
        in_place = restored is not None
        if in_place and self.world.fetching.random() < self.world.shape.fetches:
            self.world.note("replica {}: has lost a part of {}", self.replica, restored.name)
            restored = None
        if not in_place:
            self.repaired(None)
        share = _REPAIRED if in_place else 1.0
        seconds = share * self.world.shape.build_s * self.world.rng.uniform(0.7, 1.3)
        self.build(seconds, restored, in_place=in_place)

    def _restored(self, life: "Life") -> Held | None:
        """Return the state that the replica restores after it has replaced a worker, None if it has none.

        It is the newest state of which all ranks have a snapshot, or an estimate of it.
        """
        ranks = [set(rank.snapshots) for rank in life.ranks]
        found = max(set.intersection(*ranks), key=lambda held: held.name, default=None)
        if found is None or self.world.repairing.random() >= self.world.shape.estimates:
            return found
        if found.step == 0:
            return None
        number = self._number + 1
        content = hash((found.chain, -8, self.replica, number))
        lineage = values.estimated(found.lineage, self.replica, number)
        estimate = Held(found.step, lineage, content, found.positions)
        self.world.checks.estimated(found, estimate)
        self.world.note("replica {}: estimates {}", self.replica, estimate.name)
        return estimate

    def repaired(self, life: "Life | None") -> None:
        """End the notice that a worker is being replaced: ``life`` has reported again, or (None) there is none."""
        if self._notice is not None and (life is None or life is self.life):
            self._notice.close()
            self._notice = None

    def finished(self, life: "Life") -> None:
        """End a life that has done its work."""
        life.end()
        self.life = None
        self.world.unfinished -= 1
        self.world.note("replica {}: the run is over", self.replica)


class Life:
    """One set of a replica's worker processes.

    Attributes:
        number: number of the life, from 0.
        restored: the state that it begins with, see :meth:`Agent.build`.
        in_place: whether it goes on with the processes of the life before, but for the lost ones.
        has_given_up: whether a rank has ended itself, because there is neither a state nor a checkpoint.
        is_closing: whether the agent has told the processes that one of them was lost.
        is_repairing: whether the replica replaces the lost one in place.
        is_over: whether the agent has ended the processes.
        ranks: the worker processes; rank 0 is the leader.
        quorum: the last quorum that the leader received.
        aside_since: virtual time in seconds at which the replica began to write a checkpoint, None while it executes
            steps.
        undone: steps that all ranks find wrong after the update.
        client: the production client of the quorum server.
        votes: the votes of the training threads.
        answers: the broadcasts of the agreement threads.
    """

    def __init__(self, agent: Agent, number: int, restored: Held | None = None, *, in_place: bool = False):
        self.agent, self.world, self.number, self.restored = agent, agent.world, number, restored
        self.in_place = in_place
        self.is_closing = self.is_over = self.is_repairing = self.has_given_up = False
        self.quorum: Quorum | None = None
        self.aside_since: float | None = None
        self.undone: set[int] = set()
        ranks = self.world.shape.ranks
        self.votes, self.answers = Group(self.world, ranks), Group(self.world, ranks)
        self.ranks = [Rank(self, index) for index in range(ranks)]
        self._finished = 0
        with _links(self.world, agent.replica, self.ranks[0]):
            self.client = clients.QuorumClient(Path("."), agent.replica, number, "token", self.world.limits)

    def start(self) -> None:
        rows = [address_row(self.agent.replica, self.number, rank.index) for rank in self.ranks]
        self.client.hello(rows, self.ranks[0].held.step)
        for rank in self.ranks:
            rank.start()

    def close(self, reason: str) -> None:
        """Leave the quorum and the rings, because a rank was lost; see ``ReplicaManager._on_close``."""
        self.is_closing = True
        for rank in self.ranks:
            if rank.is_alive and rank.awake_at <= self.world.time.now:
                if rank.index == 0 and self.is_repairing:
                    self.client.abandon(reason)
                elif rank.index == 0:
                    self.client.leave(reason)
                rank.give_up(reason)

    def end(self) -> None:
        self.is_over = True
        for rank in self.ranks:
            rank.dies()
        self.client.close()

    async def asks(self, report: Report) -> Agreed:
        """Ask the quorum server for the quorum of the next step, on the leader's agreement thread."""
        self.aside_since = None
        self.world.note("replica {}: reports {}", self.agent.replica, _brief(report))
        try:
            self.quorum = (await self._answer(report)).result()
            rows = {replica: self.client.rows(replica, life) for replica, life in self.quorum.lives.items()}
        except FtError as error:
            return Agreed(None, {}, str(error))
        return Agreed(self.quorum, rows)

    async def _answer(self, report: Report) -> "Future[Quorum]":
        done, leader = Signal(), self.ranks[0]
        self.client.ask(report).add_done_callback(lambda future: leader.do(_HANDOVER_S, done.set, future))
        future: Future[Quorum] = await done
        return future

    async def finished(self, rank: Rank) -> None:
        """Note that a rank has done all its work. After the last one, the processes end."""
        if rank.index == 0:
            await self._answer(replace(rank.steps.report(), finished=True))
        self._finished += 1
        if self._finished == len(self.ranks):
            self.world.time.after(self.world.rng.uniform(*_CLOSING_S), self.agent.finished, self)


class Group:
    """Collective operations between the ranks of a replica. All ranks call them equally often, in the same order.

    Args:
        world: the simulated run.
        ranks: number of ranks.
    """

    def __init__(self, world: "World", ranks: int):
        self._world, self._ranks = world, ranks
        self._calls = [0] * ranks
        self._rounds: dict[int, tuple[list[Any], Signal]] = {}

    async def gather(self, rank: int, value: Any) -> list[Any]:
        """Return the values that all ranks give."""
        values, signal = self._round(rank)
        values.append(value)
        if len(values) == self._ranks:
            signal.set()
        return await self._received(signal) or values

    async def broadcast(self, rank: int, value: Any) -> Any:
        """Return the value that rank 0 gives."""
        _, signal = self._round(rank)
        if rank == 0:
            signal.set(value)
            return value
        return await self._received(signal)

    def _round(self, rank: int) -> tuple[list[Any], Signal]:
        call = self._calls[rank]
        self._calls[rank] += 1
        self._rounds.pop(min(self._calls) - 2, None)
        return self._rounds.setdefault(call, ([], Signal()))

    async def _received(self, signal: Signal) -> Any:
        value = await signal
        if self._ranks > 1:
            await pause(self._world.rng.uniform(*_SPREAD_S))
        return value


def _links(world: "World", replica: int, rank: Rank | None):
    """Replace the network link of the production client by a simulated link, for the duration of the context."""
    return mock.patch.object(clients, "ServerLink", lambda *arguments: Link(world, replica, rank, *arguments))


def _brief(report: Report) -> str:
    suspects = f", suspects {list(report.suspects)}" if report.suspects else ""
    return f"({report.next_step}, {report.lineage}){suspects}"
