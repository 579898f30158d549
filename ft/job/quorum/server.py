"""Process of the quorum server: an event loop that reads messages, calls ``decide`` and sends the answers.

The server decides which replicas (full copies of the model, each with its own world of ranks) take part in a training
step: the quorum. The leader of each replica is its client. A life is one world of worker processes of a replica; a term
is the number of a server, claimed as in a leader election.

The server has its own protocol instead of the control plane's control channel for two reasons. That channel cannot
report a broken connection, which is the first sign of a leader's death. It also needs torch, whose import would take
most of the time until a killed server has a successor. Nothing is kept on disk but the claim of the term and
``quorum.json``: a new server learns the last quorum from the clients that reconnect.
"""

import argparse
import contextlib
import json
import os
import selectors
import signal
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ft.base import events, token
from ft.base.errors import FtError, UserError
from ft.job.quorum import reactions, wire
from ft.job.quorum.connections import Connection, Guests
from ft.job.quorum.decide import Decision, decide
from ft.job.quorum.state import Note, Options, State
from ft.job.quorum.values import NoQuorum, Quorum, Report
from ft.net.codec import BadMessage, from_json, is_count, to_json
from ft.platform import election as election
from ft.platform import processes
from ft.platform.election import QUORUM, SUCCEEDED, LeaseRecord

_TOKEN_S = 60.0
"""Limit for reading the run's token, in seconds."""
_BEAT = wire.pack({"kind": "beat"})


@dataclass(frozen=True)
class Given:
    """Arguments with which the server process is started.

    Attributes:
        options: options of the run's quorum.
        where: address to listen on, "tcp://HOST:PORT"; port 0 means any free port.
        takes_over: whether the run had another server before. If so, the record in ``quorum.json`` that the run's last
            step is done is valid.
    """

    options: Options
    where: str = "tcp://127.0.0.1:0"
    takes_over: bool = False


class Server:
    """I/O around :func:`ft.job.quorum.decide.decide`: sockets, files and the clock.

    Args:
        run_dir: directory of the whole run.
        secret: token of the run.
        given: arguments of the process.

    Raises:
        UserError: the server cannot listen at the address.
        OSError: the directory cannot be written.
    """

    def __init__(self, run_dir: Path, secret: str, given: Given):
        self._run_dir, self._events = run_dir, events.EventLog(run_dir / "events.jsonl")
        host, port = wire.parse_where(given.where)
        try:
            self._listener = socket.create_server((host, port), backlog=1024)
        except OSError as error:
            raise UserError(f"{given.where} cannot be listened at: {error.strerror}", "give another address") from error
        self._listener.setblocking(False)
        self._where = f"tcp://{host}:{self._listener.getsockname()[1]}"
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._guests = Guests(self._selector, secret)
        before = election.read(run_dir, QUORUM) if given.takes_over else None
        end = before.end if before is not None else None
        self._state = State.begin(given.options, election.claim_next(run_dir, str(os.getpid())), time.monotonic(), end)
        self._rows: dict[int, tuple[int, bytes]] = {}
        self._looked_at, self._due = 0.0, time.monotonic()
        election.renew(run_dir, self._standing(), QUORUM)

    def run(self) -> int:
        """Serve until a later server has taken over; return the exit code."""
        while True:
            wait = min(self._due, self._looked_at + self._state.options.limits.beat_s) - time.monotonic()
            ready = self._selector.select(max(0.0, wait))
            for key, mask in ready:
                if key.fileobj is self._listener:
                    self._guests.accept(self._listener)
                else:
                    self._serve(key.data, mask)
            if not self._keep_house() or not self._answer():
                return SUCCEEDED

    def close(self) -> None:
        self._guests.close()
        self._listener.close()
        self._events.close()

    # --- what comes in ----------------------------------------------------------------------------------------------

    def _serve(self, guest: Connection, mask: int) -> None:
        try:
            if mask & selectors.EVENT_WRITE:
                guest.channel.flush()
            if mask & selectors.EVENT_READ:
                for body in guest.channel.read():
                    self._take(guest, wire.unpack(body))
            self._guests.attend(guest)
        except FtError as error:
            self._drop(guest, str(error))

    def _take(self, guest: Connection, message: dict[str, Any]) -> None:
        """Process one message of a member of the run.

        Raises:
            FtError: the message is not valid; no correct client sends it.
        """
        now, kind = time.monotonic(), message.pop("kind")
        if kind == "beat":
            guest.channel.send(_BEAT)
        elif kind == "hello":
            self._welcome(guest, now, message)
        elif kind == "notice":
            self._noted(now, message)
        elif guest.refused:
            self._refuse(guest, guest.refused)
        elif guest.replica is None:
            raise BadMessage(f"{kind[:20]!r} without a hello")
        elif kind == "report":
            self._asked(guest, now, message)
        elif kind == "aside":
            reactions.aside(self._state, now, guest.replica)
        elif kind == "leave":
            reason = str(message.get("reason", ""))[:200]
            self._write(reactions.leaves(self._state, now, guest.replica, guest.life, reason))
        else:
            raise BadMessage(f"{kind[:20]!r} is no message for the quorum server")
        if guest.replica is not None and self._guests.leaders.get(guest.replica) is guest:
            reactions.beat(self._state, now, guest.replica)

    def _welcome(self, guest: Connection, now: float, message: dict[str, Any]) -> None:
        replica, life, rows, known = (message.get(name) for name in ("replica", "life", "rows", "known"))
        if not is_count(replica) or not is_count(life) or not _are_rows(rows) or not isinstance(known, dict):
            raise BadMessage("a hello without replica, life, rows or known")
        last = from_json(Quorum, message["last"]) if message.get("last") is not None else None
        try:
            notes = reactions.hello(self._state, now, replica, life, last)
        except NoQuorum as error:
            guest.refused = str(error)
            self._refuse(guest, guest.refused)
            return
        previous = self._guests.leaders.get(replica)
        guest.replica, guest.life = replica, life
        guest.rows = {int(number): value for number, value in known.items() if number.isdecimal()}
        self._guests.leaders[replica] = guest
        if previous is not None and previous is not guest:
            self._drop(previous, "its leader has connected again")
        self._rows[replica] = (life, wire.pack({"kind": "rows", "replica": replica, "life": life, "rows": rows}))
        self._write(notes)

    def _asked(self, guest: Connection, now: float, message: dict[str, Any]) -> None:
        report = from_json(Report, message.get("report"))
        if (report.replica, report.life) != (guest.replica, guest.life):
            raise BadMessage(f"a report of life {report.life} of replica {report.replica} from another's connection")
        try:
            self._write(reactions.report(self._state, now, report))
        except NoQuorum as error:
            self._refuse(guest, str(error))

    def _noted(self, now: float, message: dict[str, Any]) -> None:
        replica, life, what = (message.get(name) for name in ("replica", "life", "what"))
        is_known = is_count(replica) and what in ("given up", "arriving")
        if not is_known or not (is_count(life) or (life == -1 and what == "given up")):
            raise BadMessage("a notice without replica, life or what")
        if what == "given up":
            reason = str(message.get("reason", ""))[:200]
            self._write(reactions.given_up(self._state, now, replica, life, reason))
        else:
            self._write(reactions.arriving(self._state, now, replica, life))

    def _drop(self, guest: Connection, reason: str) -> None:
        self._guests.drop(guest, reason)
        if guest.replica is not None and self._guests.leaders.get(guest.replica) is guest:
            del self._guests.leaders[guest.replica]
            self._write(reactions.lost(self._state, time.monotonic(), guest.replica, guest.life))

    # --- what goes out ----------------------------------------------------------------------------------------------

    def _answer(self) -> bool:
        """Decide and send the answers; return False once a later server has taken over."""
        while True:
            now = time.monotonic()
            self._write(reactions.time_passed(self._state, now))
            if not self._raise_term():
                return False
            decision = decide(self._state, now)
            if decision.quorum is None and not decision.refused:
                self._due = now + 3600.0 if decision.until is None else decision.until
                return True
            if election.is_over(self._run_dir, self._state.term):
                return False
            if decision.quorum is not None and decision.quorum.finished:
                self._stand()
            self._publish(now, decision)

    def _publish(self, now: float, decision: Decision) -> None:
        for replica in decision.refused:
            reactions.answered(self._state, replica)
            if guest := self._guests.leaders.get(replica):
                self._refuse(guest, decision.reason)
        if decision.quorum is None:
            return
        frame = wire.pack({"kind": "quorum", "quorum": to_json(decision.quorum)})
        for replica in decision.to:
            if guest := self._guests.leaders.get(replica):
                self._give(guest, decision.quorum, frame)
        if decision.is_repeated:
            for replica in decision.to:
                reactions.answered(self._state, replica)
        else:
            self._write(reactions.formed(self._state, now, decision.quorum, dict(decision.excluded)))

    def _give(self, guest: Connection, quorum: Quorum, frame: bytes) -> None:
        """Send a quorum, preceded by the rows (rank addresses) of members that this leader has not received yet."""
        try:
            for member, life in quorum.lives.items():
                rows = self._rows.get(member)
                if member != guest.replica and guest.rows.get(member) != life and rows and rows[0] == life:
                    guest.channel.send(rows[1])
                    guest.rows[member] = life
            guest.channel.send(frame)
            self._guests.attend(guest)
        except FtError as error:
            self._drop(guest, str(error))

    def _refuse(self, guest: Connection, reason: str) -> None:
        try:
            guest.channel.send(wire.pack({"kind": "none", "reason": reason}))
            self._guests.attend(guest)
        except FtError as error:
            self._drop(guest, str(error))

    # --- house ------------------------------------------------------------------------------------------------------

    def _keep_house(self) -> bool:
        """Every ``beat_s`` seconds, drop old unauthenticated connections and check the lease.

        Returns:
            False if a later server exists.
        """
        now = time.monotonic()
        if now - self._looked_at < self._state.options.limits.beat_s:
            return True
        self._looked_at = now
        self._guests.send_strangers_away(now)
        if election.is_over(self._run_dir, self._state.term):
            return False
        self._stand()
        return True

    def _stand(self) -> None:
        """Write the lease record if the file has other content; a paused older server may have overwritten it."""
        if election.read(self._run_dir, QUORUM) != self._standing():
            with contextlib.suppress(OSError):  # a full disk; connected clients do not need the file
                election.renew(self._run_dir, self._standing(), QUORUM)

    def _raise_term(self) -> bool:
        """Claim a higher term if a client knows a quorum number that belongs to a higher term than this server's.

        Returns:
            False if another server has taken over in the meantime.
        """
        if self._state.needed_term() <= self._state.term:
            return True
        if election.is_over(self._run_dir, self._state.term):
            return False
        self._state.term = election.claim_next(self._run_dir, str(os.getpid()), self._state.needed_term() + 1)
        self._stand()
        return True

    def _standing(self) -> LeaseRecord:
        return LeaseRecord(self._state.term, 0, self._where, "", os.getpid(), end=self._state.end)

    def _write(self, notes: list[Note]) -> None:
        for note in notes:
            self._events.write(events.observed(note.name, note.values))


def _are_rows(rows: Any) -> bool:
    return isinstance(rows, list) and all(
        isinstance(row, dict) and all(isinstance(value, str) for value in row.values()) for row in rows
    )


def parse_options(text: str) -> Given:
    """Parse the options of the command line.

    Raises:
        UserError: the text is no JSON object, lacks replicas, or holds options that are not valid.
    """
    try:
        values = json.loads(text)
        where, takes_over = values.pop("where", Given.where), values.pop("takes_over", False)
        wire.parse_where(where)
        return Given(from_json(Options, values).check(), where, bool(takes_over))
    except (ValueError, TypeError, AttributeError, BadMessage) as error:
        raise UserError(
            f"--options {text[:200]} cannot be read ({type(error).__name__}: {error})",
            'give a JSON object such as {"replicas": 3, "min_replicas": 1, "where": "tcp://127.0.0.1:0"}',
        ) from error


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m ft.job.quorum", description="The quorum server of one run.")
    parser.add_argument("--run-dir", type=Path, required=True, help="of the whole run: token, quorum.json, events")
    parser.add_argument("--options", required=True, help="JSON: replicas, min_replicas, where, limits, takes_over...")
    words = parser.parse_args(argv)
    processes.die_with_parent(signal.SIGKILL)
    try:
        given = parse_options(words.options)
        server = Server(words.run_dir, token.find(words.run_dir, _TOKEN_S), given)
    except UserError as error:
        parser.exit(UserError.exit_code, f"{parser.prog}: {error}\n")
    code = server.run()
    server.close()
    sys.exit(code)
