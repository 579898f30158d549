"""Simulated process of FT-HSDP's quorum server, around the production dispatch (``ft.job.quorum.dispatch``).

A quorum is the set of replicas that execute a training step together. Connections, the claims of terms, the lease
record, pauses and deaths are simulated in virtual time; all decisions of the server are made by production code.
"""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ft.base.errors import FtError
from ft.job.quorum.decide import Decision
from ft.job.quorum.dispatch import Act, Acts, ClaimTerm, Close, Dispatch, KeepLease, NewestTerm, Send, carry_out
from ft.job.quorum.state import Options, State
from ft.job.quorum.values import Quorum

if TYPE_CHECKING:
    from tests.simulation.hsdp.link import Connection
    from tests.simulation.hsdp.world import World


class _CheckedDispatch(Dispatch):
    """The production dispatch; ``formed`` is called with every new quorum, before it is applied."""

    def __init__(self, formed: Callable[[Quorum], None], *arguments: Any):
        super().__init__(*arguments)
        self._formed = formed

    def publish(self, now: float, decision: Decision) -> Acts[None]:
        if decision.quorum is not None and not decision.is_repeated:
            self._formed(decision.quorum)
        yield from super().publish(now, decision)


class Server:
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

    def __init__(self, world: "World", term: int, options: Options, end: tuple[int, int] | None):
        self.world, self.is_alive, self.awake_at = world, True, 0.0
        self.connections: list[Connection] = []
        self.furthest = 0
        self._dispatch = _CheckedDispatch(lambda quorum: world.formed(self, quorum), options, term, world.time.now, end)
        self._next_at = math.inf

    @property
    def state(self) -> State:
        """Return the data of the dispatch about the replicas and the last quorum."""
        return self._dispatch.state

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
                carry_out(self._dispatch.take(self.world.time.now, connection, message), self._do)
            except FtError:
                connection.closed_by_server()
                self._gone(connection)

    def _gone(self, connection: "Connection") -> None:
        if connection in self.connections:
            self.connections.remove(connection)
            carry_out(self._dispatch.gone(self.world.time.now, connection), self._do)

    def _answer(self) -> None:
        """Run the server's loop once, and schedule its next turn for when the dispatch asks for it."""
        now = self.world.time.now
        due = carry_out(self._dispatch.turn(now), self._do)
        if due is None:
            self.dies()
        elif due < self._next_at:
            self._next_at = max(now, due) + 1e-6
            self.world.time.after(self._next_at - now, self._turn, self._next_at)

    def _turn(self, at: float) -> None:
        if at == self._next_at:
            self._next_at = math.inf
            self._when_awake(lambda: None)

    def _do(self, act: Act) -> int | None:
        match act:
            case Send(connection, frame):
                connection.to_client(frame)
            case Close(connection, _):
                if connection in self.connections:
                    connection.closed_by_server()
                    self.connections.remove(connection)
            case NewestTerm():
                return self.world.newest_term
            case ClaimTerm(least):
                return self.world.claim(least)
            case KeepLease(term, end):
                self.world.keep_lease(self, term, end)
        return None
