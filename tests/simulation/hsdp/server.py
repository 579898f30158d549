"""The simulated quorum server, around the production dispatch (``ft.job.quorum.dispatch``), and its connections.

All decisions of the server are made by production code; claims of terms, the lease record, pauses and deaths are
simulated. The connections replace the link of the production client and its thread. Messages of one connection arrive
in order. A cut of the network delays them. A broken connection loses the messages in transit, and the next connection
starts with the client's greeting, so that messages may arrive twice, late, and at another server.
"""

import math
from typing import TYPE_CHECKING, Any

from ft.base.errors import FtError
from ft.job.quorum.decide import QuorumDecision
from ft.job.quorum.dispatch import Dispatch, Peer
from ft.job.quorum.state import QuorumOptions
from ft.job.quorum.values import pack, unpack
from tests.simulation.engine import Lane

if TYPE_CHECKING:
    from tests.simulation.hsdp.world import World

# --- connections ------------------------------------------------------------------------------------------------------

_LATENCY_S, _DIAL_S, _AGAIN_S = (0.0003, 0.004), (0.001, 0.01), (0.02, 0.25)
"""Durations as (least, most) virtual seconds: a message's latency, connecting, and the pause before a retry."""


class Link:
    """A leader's link to the quorum server, with the interface of ``ft.job.quorum.client.ServerLink``.

    Args:
        world: the simulated run.
        replica: replica of the leader, for network cuts.
        rank: the leader; None: the link belongs to a process that neither pauses nor dies.
        limits: timeouts of the quorum.
        greet: function that returns the frames that open a connection.
        take: function that is called with each received message.
        away: function that is called with the seconds without a connection whenever an attempt to connect fails.
    """

    def __init__(self, world: "World", replica: int, rank, _run_dir, _token, limits, greet, take, away):
        self.world, self.replica, self.rank = world, replica, rank
        self._limits, self._greet, self._take, self._away = limits, greet, take, away
        self._connection: Connection | None = None
        self._closed, self._heard_at, self._gone_at = False, 0.0, 0.0
        self.is_started = False

    def start(self) -> None:
        self.is_started = True
        self._gone_at = self.world.time.now
        self._dial()

    def send(self, frame: bytes) -> None:
        if self._connection is not None:
            self._connection.to_server(frame)

    def close(self) -> None:
        self._closed = True
        if self._connection is not None:
            self._connection.closed_by_client(heard=True)

    def broke(self, connection: "Connection") -> None:
        """Note that the connection has broken, and connect again after a pause of random length."""
        if connection is self._connection:
            self._connection, self._gone_at = None, self.world.time.now
            self._later(self.world.rng.uniform(*_AGAIN_S), self._dial)

    def arrives(self, connection: "Connection", frame: bytes) -> None:
        self._later(0.0, self._taken, connection, frame)

    def _taken(self, connection: "Connection", frame: bytes) -> None:
        if connection is self._connection:
            self._heard_at = self.world.time.now
            message = unpack(frame)
            if message["kind"] != "beat":
                self._take(message)

    def _later(self, seconds: float, action, *arguments: Any) -> None:
        """Schedule an action in the leader's process, which may be paused or dead by then."""
        if self.rank is not None:
            self.rank.do(seconds, self._unless_closed, action, arguments)
        else:
            self.world.time.after(seconds, self._unless_closed, action, arguments)

    def _unless_closed(self, action, arguments: tuple) -> None:
        if not self._closed:
            action(*arguments)

    def _dial(self) -> None:
        if self._connection is not None:
            return
        server, term = self.world.standing, self.world.lease_term
        if not server.is_alive or self.world.cut_until(self.replica, None) > self.world.time.now:
            self._away(self.world.time.now - self._gone_at, None)
            self._later(self.world.rng.uniform(*_AGAIN_S), self._dial)
            return
        self._connection = Connection(self.world, self, server, term)
        self._heard_at = self.world.time.now
        for frame in self._greet():
            self._connection.to_server(frame)
        self._later(self._limits.beat_s, self._beat, self._connection)

    def _beat(self, connection: "Connection") -> None:
        if connection is not self._connection:
            return
        silent = self.world.time.now - self._heard_at
        if silent > self._limits.contact_s or self.world.lease_term > connection.term:
            connection.closed_by_client(heard=False)
            self.broke(connection)
            return
        connection.to_server(pack({"kind": "beat"}))
        self._later(self._limits.beat_s, self._beat, connection)


class Connection(Peer):
    """One connection between a leader and the quorum server.

    Args:
        world: the simulated run.
        link: the leader's end.
        server: the server.
        term: term in the lease record in which the leader has found the server.
    """

    def __init__(self, world: "World", link: Link, server: "Server", term: int):
        super().__init__()
        self.world, self.link, self.server, self.term = world, link, server, term
        self._is_open = True
        begins_at = world.time.now + world.rng.uniform(*_DIAL_S)
        self._up, self._down = Lane(world.time, begins_at), Lane(world.time, begins_at)
        server.connections.append(self)

    def to_server(self, frame: bytes) -> None:
        self._send(self._up, self._at_server, frame)

    def to_client(self, frame: bytes) -> None:
        self._send(self._down, self._at_client, frame)

    def closed_by_client(self, heard: bool) -> None:
        """Close the connection. If it is not ``heard``, the client gives up a dead network."""
        self._is_open = False
        if heard:
            self._send(self._up, self._end_at_server, None)

    def closed_by_server(self) -> None:
        self._is_open = False
        self._send(self._down, self._end_at_client, None)

    def _send(self, lane: Lane, arrive, frame: bytes | None) -> None:
        lane.send(self.world.rng.uniform(*_LATENCY_S), self._through, arrive, frame)

    def _through(self, arrive, frame: bytes | None) -> None:
        held_up = self.world.cut_until(self.link.replica, None) - self.world.time.now
        if held_up > 0:
            self.world.time.after(held_up + 1e-6, self._through, arrive, frame)
        else:
            arrive(frame)

    def _at_server(self, frame: bytes) -> None:
        if self._is_open:
            self.server.hears(self, unpack(frame))

    def _at_client(self, frame: bytes) -> None:
        if self._is_open:
            self.link.arrives(self, frame)

    def _end_at_server(self, _frame: None) -> None:
        self.server.loses(self)

    def _end_at_client(self, _frame: None) -> None:
        self.link.broke(self)


# --- server -----------------------------------------------------------------------------------------------------------


class Server(Dispatch):
    """A simulated quorum server process, corresponding to ``ft.job.quorum.server.Server``.

    Args:
        world: the simulated run.
        term: term that the server has claimed.
        options: options of the run's quorum.
        end: end of the run, as in the lease record of the previous server.

    Attributes:
        is_alive: False once the process has ended.
        awake_at: virtual time in seconds until which the process is paused.
        connections: open connections to leaders.
        furthest: step of the last quorum that the server formed.
    """

    def __init__(self, world: "World", term: int, options: QuorumOptions, end: tuple[int, int] | None):
        super().__init__(options, term, world.time.now, end)
        self.world, self.is_alive, self.awake_at = world, True, 0.0
        self.connections: list[Connection] = []
        self.furthest = 0
        self._next_at = math.inf

    @property
    def term(self) -> int:
        """Return the server's term. Each new server has a higher term; a server ends when a higher one is claimed."""
        return self.state.term

    def start(self) -> None:
        self._answer()

    def dies(self) -> None:
        self.is_alive = False
        for connection in self.connections:
            connection.closed_by_server()

    def hears(self, connection: "Connection", message: dict[str, Any]) -> None:
        self._when_awake(self._take, connection, message)

    def loses(self, connection: "Connection") -> None:
        self._when_awake(self._gone, connection)

    def _when_awake(self, action, *arguments: Any) -> None:
        if not self.is_alive:
            return
        if (rest := self.awake_at - self.world.time.now) > 0:
            self.world.time.after(rest, self._when_awake, action, *arguments)
            return
        action(*arguments)
        self._answer()

    def _take(self, connection: "Connection", message: dict[str, Any]) -> None:
        if connection in self.connections:
            try:
                self.take(self.world.time.now, connection, message)
            except FtError:
                connection.closed_by_server()
                self._gone(connection)

    def _gone(self, connection: "Connection") -> None:
        if connection in self.connections:
            self.connections.remove(connection)
            self.gone(self.world.time.now, connection)

    def _answer(self) -> None:
        """Run the server's loop once, and schedule its next turn for when the dispatch asks for it."""
        now = self.world.time.now
        due = self.turn(now)
        if due is None:
            self.dies()
        elif due < self._next_at:
            self._next_at = max(now, due) + 1e-6
            self.world.time.after(self._next_at - now, self._turn, self._next_at)

    def _turn(self, at: float) -> None:
        if at == self._next_at:
            self._next_at = math.inf
            self._when_awake(lambda: None)

    # --- what production does with sockets and files ------------------------------------------------------------------

    def publish(self, now: float, decision: QuorumDecision) -> None:
        if decision.quorum is not None and not decision.is_repeated:
            self.world.formed(self, decision.quorum)
        super().publish(now, decision)

    def send(self, peer: Connection, message: bytes) -> None:
        peer.to_client(message)

    def drop(self, peer: Connection) -> None:
        if peer in self.connections:
            peer.closed_by_server()
            self.connections.remove(peer)

    def log(self, notes: list[Any]) -> None:
        pass

    def newest_term(self) -> int:
        return self.world.newest_term

    def claim_term(self, least: int) -> int:
        return self.world.claim(least)

    def keep_lease(self) -> None:
        self.world.keep_lease(self, self.state.term, self.state.end)
