"""Dispatch of the quorum server: it processes messages, and decides when to answer them.

The dispatch knows the connections by their :class:`Peer` only, and does no I/O: the server process and the simulated
server (``tests/simulation/hsdp``) are subclasses that do it.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ft.base.events import Note
from ft.job.quorum import reactions
from ft.job.quorum.decide import QuorumDecision, decide, missing, next_number
from ft.job.quorum.state import QuorumOptions, QuorumState
from ft.job.quorum.values import NoQuorum, Quorum, Report, pack
from ft.net.codec import BadMessage, from_json, is_count, to_json

_IDLE_S = 3600.0
"""Seconds until the next decision while no replica waits for an answer."""
_BEAT = pack({"kind": "beat"})


@dataclass(eq=False, kw_only=True)
class Peer:
    """The data of the dispatch about one connection.

    Attributes:
        replica: number of the replica if the peer is its leader, else None.
        life: life of that replica.
        rows: replica -> life whose rows (addresses of its ranks) were sent to this peer.
        repairs: replica for which the peer has announced that a lost worker is being replaced, else None.
        refused: why this leader gets no quorum, or "" if it may get one.
    """

    replica: int | None = None
    life: int = -1
    rows: dict[int, int] = field(default_factory=dict)
    repairs: int | None = None
    refused: str = ""


class Dispatch(ABC):
    """One quorum server without its I/O.

    Args:
        term: term that the server has claimed.
        now: time in seconds of the server's monotonic clock, as in all methods.
        end: (next_step, lineage) of a replica that has done the last step of the run, taken over from the previous
            server; None if there is none.

    Attributes:
        state: what the server knows of the replicas and of the last quorum.
    """

    def __init__(self, options: QuorumOptions, term: int, now: float, end: tuple[int, int] | None = None):
        self.state = QuorumState.begin(options, term, now, end)
        self._leaders: dict[int, Peer] = {}
        self._rows: dict[int, tuple[int, bytes]] = {}
        self._repairers: dict[int, set[Peer]] = {}
        self._checked_at = float("-inf")

    # --- I/O --------------------------------------------------------------------------------------------------------

    @abstractmethod
    def send(self, peer: Peer, message: bytes) -> None:
        """Send a packed message. If that fails, close the connection and call :meth:`gone`, but not from here."""

    @abstractmethod
    def drop(self, peer: Peer) -> None:
        """Close a connection, of which :meth:`gone` need not be called."""

    @abstractmethod
    def log(self, notes: Iterable[Note]) -> None:
        """Append events to the run's record."""

    @abstractmethod
    def newest_term(self) -> int | None:
        """Return the newest term that any server has claimed, None if it cannot be read now."""

    @abstractmethod
    def claim_term(self, least: int) -> int:
        """Claim the next free term, ``least`` or higher, and return it."""

    @abstractmethod
    def keep_lease(self) -> None:
        """Write the lease record with the term and the end in ``state``, unless it has this content already."""

    # --- incoming messages ------------------------------------------------------------------------------------------

    def take(self, now: float, peer: Peer, message: Mapping[str, Any]) -> None:
        """Process a message of ``peer``, a member of the run.

        Raises:
            FtError: the message is not valid; no correct client sends it.
        """
        kind = message["kind"]
        if kind == "beat":
            self.send(peer, _BEAT)
        elif kind == "hello":
            self._welcome(now, peer, message)
        elif kind == "notice":
            self._noted(now, peer, message)
        elif peer.refused:
            self._refuse(peer, peer.refused)
        elif peer.replica is None:
            raise BadMessage(f"{kind[:20]!r} without a hello")
        elif kind == "report":
            self._asked(now, peer, message)
        elif kind == "inspect":
            waits = {str(number): why for number, why in missing(self.state, now).items()}
            self.send(peer, pack({"kind": "inspected", "next": next_number(self.state), "waits": waits}))
        elif kind == "aside":
            reactions.aside(self.state, now, peer.replica)
        elif kind == "leave":
            reason = str(message.get("reason", ""))[:200]
            self.log(reactions.leaves(self.state, now, peer.replica, peer.life, reason))
        else:
            raise BadMessage(f"{kind[:20]!r} is no message for the quorum server")
        if peer.replica is not None and self._leaders.get(peer.replica) is peer:
            reactions.beat(self.state, now, peer.replica)

    def gone(self, now: float, peer: Peer) -> None:
        """Note that the connection of ``peer`` has ended."""
        if peer.repairs is not None:
            repairers = self._repairers[peer.repairs]
            repairers.discard(peer)
            if not repairers:
                reactions.repaired(self.state, peer.repairs)
        if peer.replica is not None and self._leaders.get(peer.replica) is peer:
            del self._leaders[peer.replica]
            reactions.lost(self.state, now, peer.replica, peer.life)

    def _welcome(self, now: float, peer: Peer, message: Mapping[str, Any]) -> None:
        replica, life, rows, known = (message.get(name) for name in ("replica", "life", "rows", "known"))
        if not is_count(replica) or not is_count(life) or not _are_rows(rows) or not isinstance(known, dict):
            raise BadMessage("a hello without replica, life, rows or known")
        if not is_count(steps := message.get("steps", 0)):
            raise BadMessage("a hello with steps that are no count")
        last = from_json(Quorum, message["last"]) if message.get("last") is not None else None
        try:
            notes = reactions.hello(self.state, now, replica, life, last, steps)
        except NoQuorum as error:
            peer.refused = str(error)
            self._refuse(peer, peer.refused)
            return
        previous = self._leaders.get(replica)
        peer.replica, peer.life = replica, life
        peer.rows = {int(number): value for number, value in known.items() if number.isdecimal()}
        self._leaders[replica] = peer
        if previous is not None and previous is not peer:
            self.drop(previous)
        self._rows[replica] = (life, pack({"kind": "rows", "replica": replica, "life": life, "rows": rows}))
        self.log(notes)

    def _asked(self, now: float, peer: Peer, message: Mapping[str, Any]) -> None:
        report = from_json(Report, message.get("report"))
        if (report.replica, report.life) != (peer.replica, peer.life):
            raise BadMessage(f"a report of life {report.life} of replica {report.replica} from another's connection")
        try:
            self.log(reactions.report(self.state, now, report))
        except NoQuorum as error:
            self._refuse(peer, str(error))

    def _noted(self, now: float, peer: Peer, message: Mapping[str, Any]) -> None:
        replica, life, what = (message.get(name) for name in ("replica", "life", "what"))
        if not is_count(replica) or not (is_count(life) or life == -1):
            raise BadMessage("a notice without replica or life")
        if what == "given up":
            reason = str(message.get("reason", ""))[:200]
            self.log(reactions.given_up(self.state, now, replica, int(life), reason))
        elif what == "repairs" and is_count(life):
            peer.repairs = replica
            self._repairers.setdefault(replica, set()).add(peer)
            reactions.repairs(self.state, now, replica, life)
        elif what != "arriving" or not is_count(life):
            raise BadMessage("a notice without what, or without life")
        else:
            self.log(reactions.arriving(self.state, now, replica, life))

    # --- answers ----------------------------------------------------------------------------------------------------

    def turn(self, now: float) -> float | None:
        """Answer all reports that can be answered. Call it after messages, and at the time that its last call returned.

        Every ``beat_s`` seconds, it also checks that no later server exists, and that the lease record is this
        server's, because a paused older server may have overwritten it.

        Returns:
            The time of the next call at the latest; None once a later server has taken over.
        """
        state = self.state
        if now - self._checked_at >= state.options.limits.beat_s:
            self._checked_at = now
            if self._is_succeeded():
                return None
            self.keep_lease()
        while True:
            self.log(reactions.time_passed(state, now))
            if not self._raise_term():
                return None
            decision = decide(state, now)
            if decision.quorum is None and not decision.refused:
                until = now + _IDLE_S if decision.until is None else decision.until
                return min(until, self._checked_at + state.options.limits.beat_s)
            if self._is_succeeded():
                return None
            if decision.quorum is not None and decision.quorum.finished:
                self.keep_lease()
            self.publish(now, decision)

    def _is_succeeded(self) -> bool:
        newest = self.newest_term()
        return newest is not None and newest > self.state.term

    def _raise_term(self) -> bool:
        """Claim a higher term if a client knows a quorum number that belongs to a higher term than this server's.

        Returns:
            False if another server has taken over in the meantime.
        """
        state = self.state
        if state.needed_term() <= state.term:
            return True
        if self._is_succeeded():
            return False
        state.term = self.claim_term(state.needed_term() + 1)
        self.keep_lease()
        return True

    def publish(self, now: float, decision: QuorumDecision) -> None:
        """Apply a decision to the state, and send it to the leaders whose reports it answers."""
        for replica in decision.refused:
            reactions.answered(self.state, replica)
            if peer := self._leaders.get(replica):
                self._refuse(peer, decision.reason)
        if decision.quorum is None:
            return
        frame = pack({"kind": "quorum", "quorum": to_json(decision.quorum)})
        for replica in decision.to:
            if peer := self._leaders.get(replica):
                self._give(peer, decision.quorum, frame)
        if decision.is_repeated:
            for replica in decision.to:
                reactions.answered(self.state, replica)
        else:
            self.log(reactions.formed(self.state, now, decision.quorum, dict(decision.excluded)))

    def _give(self, peer: Peer, quorum: Quorum, frame: bytes) -> None:
        """Send a quorum, preceded by the rows of members that this leader has not received yet."""
        for member, life in quorum.lives.items():
            rows = self._rows.get(member)
            if member != peer.replica and peer.rows.get(member) != life and rows and rows[0] == life:
                self.send(peer, rows[1])
                peer.rows[member] = life
        self.send(peer, frame)

    def _refuse(self, peer: Peer, reason: str) -> None:
        self.send(peer, pack({"kind": "none", "reason": reason}))


def _are_rows(rows: Any) -> bool:
    return isinstance(rows, list) and all(
        isinstance(row, dict) and all(isinstance(value, str) for value in row.values()) for row in rows
    )
