"""Simulated quorum server of FT-HSDP: the production code for decisions, in a model of the server's process.

A quorum is the set of replicas that execute a training step together. ``ft.job.quorum.decide`` forms the quorums from
the reports of the replicas' leaders (their rank 0), and ``ft.job.quorum.reactions`` updates the server's state on every
message; both are the production functions. Connections, pauses and deaths are simulated in virtual time.
"""

from typing import TYPE_CHECKING, Any

from ft.job.quorum import decide, reactions, wire
from ft.job.quorum.state import Options, State
from ft.job.quorum.values import NoQuorum, Quorum, Report
from ft.net.codec import from_json, to_json

if TYPE_CHECKING:
    from ft.lab.simulate.hsdp_protocol.link import Connection
    from ft.lab.simulate.hsdp_protocol.world import World


class Server:
    """A simulated quorum server process. Its methods correspond to those of ``ft.job.quorum.server.Server``.

    Attributes:
        is_alive: False once the process has ended.
        awake_at: virtual time in seconds until which the process is paused.
        state: state of the production decision code.
        connections: open connections to leaders.
        furthest: step of the last quorum that the server formed.
    """

    def __init__(self, world: "World", term: int, options: Options):
        self.world, self.is_alive, self.awake_at = world, True, 0.0
        self.state = State.begin(options, term, world.time.now)
        self.connections: list[Connection] = []
        self.furthest = 0
        self._leaders: dict[int, Connection] = {}
        self._rows: dict[int, tuple[int, bytes]] = {}
        self._tick()

    @property
    def term(self) -> int:
        """The server's term: each new server has a higher one, and a server ends when a higher term is claimed."""
        return self.state.term

    def dies(self) -> None:
        self.is_alive = False
        for connection in self.connections:
            connection.closed_by_server()

    # --- incoming messages -------------------------------------------------------------------------------------------

    def hears(self, connection: "Connection", message: dict[str, Any]) -> None:
        self._when_awake(self._take, connection, message)

    def loses(self, connection: "Connection") -> None:
        self._when_awake(self._drop, connection)

    def _when_awake(self, action, *arguments: Any) -> None:
        if not self.is_alive:
            return
        if (rest := self.awake_at - self.world.time.now) > 0:
            self.world.time.after(rest, self._when_awake, action, *arguments)
            return
        action(*arguments)
        self._answer()

    def _take(self, connection: "Connection", message: dict[str, Any]) -> None:
        now, kind = self.world.time.now, message["kind"]
        if connection not in self.connections:
            return
        if kind == "beat":
            connection.to_client(wire.pack({"kind": "beat"}))
        elif kind == "hello":
            self._welcome(connection, now, message)
        elif kind == "notice":
            reactions.arriving(self.state, now, message["replica"], message["life"])
        elif kind == "report":
            try:
                reactions.report(self.state, now, from_json(Report, message["report"]))
            except NoQuorum as error:
                connection.to_client(wire.pack({"kind": "none", "reason": str(error)}))
        elif kind == "aside":
            reactions.aside(self.state, now, connection.replica)
        elif kind == "leave":
            reactions.leaves(self.state, now, connection.replica, connection.life, message["reason"])
        if connection.replica is not None and self._leaders.get(connection.replica) is connection:
            reactions.beat(self.state, now, connection.replica)

    def _welcome(self, connection: "Connection", now: float, message: dict[str, Any]) -> None:
        replica, life = message["replica"], message["life"]
        last = from_json(Quorum, message["last"]) if message["last"] is not None else None
        try:
            reactions.hello(self.state, now, replica, life, last)
        except NoQuorum as error:
            connection.to_client(wire.pack({"kind": "none", "reason": str(error)}))
            return
        previous = self._leaders.get(replica)
        connection.replica, connection.life = replica, life
        connection.rows = {int(number): value for number, value in message["known"].items()}
        self._leaders[replica] = connection
        if previous is not None and previous is not connection:
            previous.closed_by_server()
            self._drop(previous)
        rows = {"kind": "rows", "replica": replica, "life": life, "rows": message["rows"]}
        self._rows[replica] = (life, wire.pack(rows))

    def _drop(self, connection: "Connection") -> None:
        if connection in self.connections:
            self.connections.remove(connection)
        if connection.replica is not None and self._leaders.get(connection.replica) is connection:
            del self._leaders[connection.replica]
            reactions.lost(self.state, self.world.time.now, connection.replica, connection.life)

    # --- outgoing messages -------------------------------------------------------------------------------------------

    def _tick(self) -> None:
        """Run the server's loop once per heartbeat interval, even if no message arrives."""
        if self.is_alive:
            self.world.time.after(self.state.options.limits.beat_s, self._tick)
            self._when_awake(lambda: None)

    def _answer(self) -> None:
        while self.is_alive:
            now = self.world.time.now
            reactions.time_passed(self.state, now)
            if self.world.newest_term > self.state.term:
                self.dies()
                return
            if self.state.needed_term() > self.state.term:
                self.state.term = self.world.claim(self.state.needed_term() + 1)
            decision = decide.decide(self.state, now)
            if decision.quorum is None and not decision.refused:
                if decision.until is not None and decision.until - now < self.state.options.limits.beat_s:
                    self.world.time.after(max(0.0, decision.until - now) + 1e-6, self._when_awake, lambda: None)
                return
            self._publish(now, decision)

    def _publish(self, now: float, decision: decide.Decision) -> None:
        for replica in decision.refused:
            reactions.answered(self.state, replica)
            if connection := self._leaders.get(replica):
                connection.to_client(wire.pack({"kind": "none", "reason": decision.reason}))
        if (quorum := decision.quorum) is None:
            return
        frame = wire.pack({"kind": "quorum", "quorum": to_json(quorum)})
        for replica in decision.to:
            if connection := self._leaders.get(replica):
                self._give(connection, quorum, frame)
        if decision.is_repeated:
            for replica in decision.to:
                reactions.answered(self.state, replica)
            return
        reactions.formed(self.state, now, quorum, dict(decision.excluded))
        self.world.formed(self, quorum)

    def _give(self, connection: "Connection", quorum: Quorum, frame: bytes) -> None:
        for member, life in quorum.lives.items():
            rows = self._rows.get(member)
            if member != connection.replica and connection.rows.get(member) != life and rows and rows[0] == life:
                connection.to_client(rows[1])
                connection.rows[member] = life
        connection.to_client(frame)
