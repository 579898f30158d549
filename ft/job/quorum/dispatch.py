"""Dispatch of the quorum server: a state machine without I/O that processes messages and decides when to answer them.

The quorum server decides which replicas (full copies of the model) take part in a training step: the quorum. The
dispatch knows the connections by their :class:`Peer` only. Its methods are generators that yield the I/O to do
(:data:`Act`), in order; :func:`carry_out` runs them. The server process and the simulated server
(``tests/simulation/hsdp``) both drive this class.
"""

from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ft.job.quorum import reactions
from ft.job.quorum.decide import Decision, decide, missing, next_number
from ft.job.quorum.state import Note, Options, State
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
        mends: replica for which the peer has announced that a lost worker is being replaced, else None.
        refused: why this leader gets no quorum, or "" if it may get one.
    """

    replica: int | None = None
    life: int = -1
    rows: dict[int, int] = field(default_factory=dict)
    mends: int | None = None
    refused: str = ""


@dataclass(frozen=True)
class Send:
    """Send the packed message ``frame`` to ``peer``. If that fails, close the connection and call
    :meth:`Dispatch.gone`.
    """

    peer: Peer
    frame: bytes


@dataclass(frozen=True)
class Close:
    """Close the connection of ``peer`` because of ``reason``; :meth:`Dispatch.gone` need not be called."""

    peer: Peer
    reason: str


@dataclass(frozen=True)
class Log:
    """Append an event to the run's record."""

    note: Note


@dataclass(frozen=True)
class NewestTerm:
    """Read the newest term that any server has claimed; that term is the answer to this act."""


@dataclass(frozen=True)
class ClaimTerm:
    """Claim the next free term, ``least`` or higher; that term is the answer to this act."""

    least: int


@dataclass(frozen=True)
class KeepLease:
    """Write the lease record with this term and end, unless the file has this content already.

    Attributes:
        term: term of this server.
        end: (next_step, lineage) of a replica that has done the last step of the run, or None.
    """

    term: int
    end: tuple[int, int] | None


Act = Send | Close | Log | NewestTerm | ClaimTerm | KeepLease
_T = TypeVar("_T")
Acts = Generator[Act, int | None, _T]


def carry_out(acts: Acts[_T], do: Callable[[Act], int | None]) -> _T:
    """Run a method of :class:`Dispatch` with ``do``, which does one act and returns its answer; return the result."""
    answer = None
    while True:
        try:
            act = acts.send(answer)
        except StopIteration as end:
            result: _T = end.value
            return result
        answer = do(act)


class Dispatch:
    """State machine of one quorum server.

    Args:
        options: options of the run's quorum.
        term: term that the server has claimed.
        now: time in seconds of the server's monotonic clock, as in all methods.
        end: (next_step, lineage) of a replica that has done the last step of the run, taken over from the previous
            server; None if there is none.

    Attributes:
        state: what the server knows of the replicas and of the last quorum.
    """

    def __init__(self, options: Options, term: int, now: float, end: tuple[int, int] | None = None):
        self.state = State.begin(options, term, now, end)
        self._leaders: dict[int, Peer] = {}
        self._rows: dict[int, tuple[int, bytes]] = {}
        self._menders: dict[int, set[Peer]] = {}
        self._checked_at = float("-inf")

    # --- incoming messages ------------------------------------------------------------------------------------------

    def take(self, now: float, peer: Peer, message: Mapping[str, Any]) -> Acts[None]:
        """Process a message of ``peer``, a member of the run.

        Raises:
            FtError: the message is not valid; no correct client sends it.
        """
        kind = message["kind"]
        if kind == "beat":
            yield Send(peer, _BEAT)
        elif kind == "hello":
            yield from self._welcome(now, peer, message)
        elif kind == "notice":
            yield from self._noted(now, peer, message)
        elif peer.refused:
            yield _refusal(peer, peer.refused)
        elif peer.replica is None:
            raise BadMessage(f"{kind[:20]!r} without a hello")
        elif kind == "report":
            yield from self._asked(now, peer, message)
        elif kind == "look":
            waits = {str(number): why for number, why in missing(self.state, now).items()}
            yield Send(peer, pack({"kind": "looked", "next": next_number(self.state), "waits": waits}))
        elif kind == "aside":
            reactions.aside(self.state, now, peer.replica)
        elif kind == "leave":
            reason = str(message.get("reason", ""))[:200]
            yield from _logged(reactions.leaves(self.state, now, peer.replica, peer.life, reason))
        else:
            raise BadMessage(f"{kind[:20]!r} is no message for the quorum server")
        if peer.replica is not None and self._leaders.get(peer.replica) is peer:
            reactions.beat(self.state, now, peer.replica)

    def gone(self, now: float, peer: Peer) -> Acts[None]:
        """Note that the connection of ``peer`` has ended."""
        if peer.mends is not None:
            menders = self._menders[peer.mends]
            menders.discard(peer)
            if not menders:
                reactions.mended(self.state, peer.mends)
        if peer.replica is not None and self._leaders.get(peer.replica) is peer:
            del self._leaders[peer.replica]
            yield from _logged(reactions.lost(self.state, now, peer.replica, peer.life))

    def _welcome(self, now: float, peer: Peer, message: Mapping[str, Any]) -> Acts[None]:
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
            yield _refusal(peer, peer.refused)
            return
        previous = self._leaders.get(replica)
        peer.replica, peer.life = replica, life
        peer.rows = {int(number): value for number, value in known.items() if number.isdecimal()}
        self._leaders[replica] = peer
        if previous is not None and previous is not peer:
            yield Close(previous, "its leader has connected again")
        self._rows[replica] = (life, pack({"kind": "rows", "replica": replica, "life": life, "rows": rows}))
        yield from _logged(notes)

    def _asked(self, now: float, peer: Peer, message: Mapping[str, Any]) -> Acts[None]:
        report = from_json(Report, message.get("report"))
        if (report.replica, report.life) != (peer.replica, peer.life):
            raise BadMessage(f"a report of life {report.life} of replica {report.replica} from another's connection")
        try:
            yield from _logged(reactions.report(self.state, now, report))
        except NoQuorum as error:
            yield _refusal(peer, str(error))

    def _noted(self, now: float, peer: Peer, message: Mapping[str, Any]) -> Acts[None]:
        replica, life, what = (message.get(name) for name in ("replica", "life", "what"))
        if not is_count(replica) or not (is_count(life) or life == -1):
            raise BadMessage("a notice without replica or life")
        if what == "given up":
            reason = str(message.get("reason", ""))[:200]
            yield from _logged(reactions.given_up(self.state, now, replica, int(life), reason))
        elif what == "mends" and is_count(life):
            peer.mends = replica
            self._menders.setdefault(replica, set()).add(peer)
            yield from _logged(reactions.mends(self.state, now, replica, life))
        elif what != "arriving" or not is_count(life):
            raise BadMessage("a notice without what, or without life")
        else:
            yield from _logged(reactions.arriving(self.state, now, replica, life))

    # --- answers ----------------------------------------------------------------------------------------------------

    def turn(self, now: float) -> Acts[float | None]:
        """Answer all reports that can be answered. Call it after messages, and at the time that its last call returned.

        Every ``beat_s`` seconds, it also checks that no later server exists, and that the lease record is this
        server's, because a paused older server may have overwritten it.

        Returns:
            The time of the next call at the latest; None once a later server has taken over.
        """
        state = self.state
        if now - self._checked_at >= state.options.limits.beat_s:
            self._checked_at = now
            if (yield from self._is_succeeded()):
                return None
            yield KeepLease(state.term, state.end)
        while True:
            yield from _logged(reactions.time_passed(state, now))
            if not (yield from self._raise_term()):
                return None
            decision = decide(state, now)
            if decision.quorum is None and not decision.refused:
                until = now + _IDLE_S if decision.until is None else decision.until
                return min(until, self._checked_at + state.options.limits.beat_s)
            if (yield from self._is_succeeded()):
                return None
            if decision.quorum is not None and decision.quorum.finished:
                yield KeepLease(state.term, state.end)
            yield from self.publish(now, decision)

    def _is_succeeded(self) -> Acts[bool]:
        newest = yield NewestTerm()
        return newest is not None and newest > self.state.term

    def _raise_term(self) -> Acts[bool]:
        """Claim a higher term if a client knows a quorum number that belongs to a higher term than this server's.

        Returns:
            False if another server has taken over in the meantime.
        """
        state = self.state
        if state.needed_term() <= state.term:
            return True
        if (yield from self._is_succeeded()):
            return False
        claimed = yield ClaimTerm(state.needed_term() + 1)
        assert claimed is not None
        state.term = claimed
        yield KeepLease(state.term, state.end)
        return True

    def publish(self, now: float, decision: Decision) -> Acts[None]:
        """Apply a decision to the state, and send it to the leaders whose reports it answers."""
        for replica in decision.refused:
            reactions.answered(self.state, replica)
            if peer := self._leaders.get(replica):
                yield _refusal(peer, decision.reason)
        if decision.quorum is None:
            return
        frame = pack({"kind": "quorum", "quorum": to_json(decision.quorum)})
        for replica in decision.to:
            if peer := self._leaders.get(replica):
                yield from self._give(peer, decision.quorum, frame)
        if decision.is_repeated:
            for replica in decision.to:
                reactions.answered(self.state, replica)
        else:
            yield from _logged(reactions.formed(self.state, now, decision.quorum, dict(decision.excluded)))

    def _give(self, peer: Peer, quorum: Quorum, frame: bytes) -> Acts[None]:
        """Send a quorum, preceded by the rows of members that this leader has not received yet."""
        for member, life in quorum.lives.items():
            rows = self._rows.get(member)
            if member != peer.replica and peer.rows.get(member) != life and rows and rows[0] == life:
                yield Send(peer, rows[1])
                peer.rows[member] = life
        yield Send(peer, frame)


def _refusal(peer: Peer, reason: str) -> Send:
    return Send(peer, pack({"kind": "none", "reason": reason}))


def _logged(notes: Iterable[Note]) -> Acts[None]:
    for note in notes:
        yield Log(note)


def _are_rows(rows: Any) -> bool:
    return isinstance(rows, list) and all(
        isinstance(row, dict) and all(isinstance(value, str) for value in row.values()) for row in rows
    )
