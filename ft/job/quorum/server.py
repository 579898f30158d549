"""Process of the quorum server: an event loop that gives messages to the dispatch and sends its answers.

Messages travel over framed streams (:mod:`ft.net.framed`), and not over the control plane's control channel, for two
reasons. That channel cannot report a broken connection, which is the first sign of a leader's death. It also needs
torch, whose import would take most of the time until a killed server has a successor. Nothing is kept on disk but the
claim of the term and ``quorum.json``: a new server learns the last quorum from the clients that reconnect.
"""

import argparse
import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ft.base import bounded_json, events, token
from ft.base.errors import FtError, UserError
from ft.base.events import Note
from ft.job.quorum.dispatch import Dispatch, Peer
from ft.job.quorum.state import QuorumOptions
from ft.job.quorum.values import FRAME, PURPOSE, parse_where, unpack
from ft.net.codec import BadMessage, from_json
from ft.net.framed import ReceivedMessage, Stream
from ft.net.listener import Acceptor
from ft.platform import election, processes
from ft.platform.election import QUORUM, SUCCEEDED, LeaseRecord


@dataclass(eq=False, kw_only=True)
class Connection(Peer):
    """One connection to the server, from a leader or an agent. ``stream`` is this end of it."""

    stream: Stream


_TOKEN_S = 60.0
"""Limit for reading the run's token, in seconds."""


@dataclass(frozen=True)
class Given:
    """Arguments with which the server process is started.

    Attributes:
        options: options of the run's quorum.
        where: address to listen on, "tcp://HOST:PORT"; port 0 means any free port.
        takes_over: whether the run had another server before. If so, the record in ``quorum.json`` that the run's last
            step is done is valid.
    """

    options: QuorumOptions
    where: str = "tcp://127.0.0.1:0"
    takes_over: bool = False


class Server(Dispatch):
    """The dispatch with its I/O: sockets, files and the clock.

    Raises:
        UserError: the server cannot listen at the address.
        OSError: the directory cannot be written.
    """

    def __init__(self, run_dir: Path, secret: str, given: Given):
        self._run_dir, self._events = run_dir, events.EventLog(run_dir / "events.jsonl")
        host, port = parse_where(given.where)
        try:
            listener = socket.create_server((host, port), backlog=1024)
        except OSError as error:
            raise UserError(f"{given.where} cannot be listened at: {error.strerror}", "give another address") from error
        self._where = f"tcp://{host}:{listener.getsockname()[1]}"
        self._acceptor = Acceptor(listener, secret, PURPOSE, "quorum server")
        self._connections: dict[Stream, Connection] = {}
        before = election.read(run_dir, QUORUM) if given.takes_over else None
        end = before.end if before is not None else None
        term, now = election.claim_next(run_dir, str(os.getpid())), time.monotonic()
        super().__init__(given.options, term, now, end)
        self._due = now
        election.renew(run_dir, self._lease(), QUORUM)

    def run(self) -> int:
        """Serve until a later server has taken over; return the exit code."""
        while True:
            messages, gone = self._acceptor.turn(max(0.0, self._due - time.monotonic()))
            for stream, message in messages:
                self._take(stream, message)
            for stream in gone:
                if connection := self._connections.pop(stream, None):
                    self._lose(connection, "its connection has ended")
            due = self.turn(time.monotonic())
            if due is None:
                return SUCCEEDED
            self._due = due

    def close(self) -> None:
        self._acceptor.close()
        self._events.close()

    def _take(self, stream: Stream, message: ReceivedMessage) -> None:
        if stream not in self._connections and stream.is_closed:  # an earlier message has ended the connection
            return
        connection = self._connections.setdefault(stream, Connection(stream=stream))
        try:
            said = unpack(b"".join(message.bodies))
            self.take(time.monotonic(), connection, said)
        except FtError as error:
            self.drop(connection)
            self._lose(connection, str(error))

    def _lose(self, connection: Connection, why: str) -> None:
        who = "" if connection.replica is None else f"replica {connection.replica} at "
        print(f"quorum server: {who}{connection.stream.address}: {why}", file=sys.stderr, flush=True)
        self.gone(time.monotonic(), connection)

    def send(self, peer: Peer, message: bytes) -> None:
        assert isinstance(peer, Connection)
        self._acceptor.answer(peer.stream, FRAME, bodies=[message])

    def drop(self, peer: Peer) -> None:
        assert isinstance(peer, Connection)
        self._connections.pop(peer.stream, None)
        self._acceptor.drop(peer.stream)

    def log(self, notes: Iterable[Note]) -> None:
        for note in notes:
            self._events.write(events.observed(note.name, note.values))

    def newest_term(self) -> int | None:
        with contextlib.suppress(OSError):  # a server that asks again soon
            return election.newest(self._run_dir)
        return None

    def claim_term(self, least: int) -> int:
        return election.claim_next(self._run_dir, str(os.getpid()), least)

    def keep_lease(self) -> None:
        if election.read(self._run_dir, QUORUM) != self._lease():
            with contextlib.suppress(OSError):  # a full disk; connected clients do not need the file
                election.renew(self._run_dir, self._lease(), QUORUM)

    def _lease(self) -> LeaseRecord:
        return LeaseRecord(self.state.term, 0, self._where, "", os.getpid(), end=self.state.end)


def parse_options(text: str) -> Given:
    """Parse the options of the command line.

    Raises:
        UserError: the text is no JSON object, lacks replicas, or holds options that are not valid.
    """
    try:
        values = bounded_json.loads(text)
        where, takes_over = values.pop("where", Given.where), values.pop("takes_over", False)
        parse_where(where)
        return Given(from_json(QuorumOptions, values).check(), where, bool(takes_over))
    except (ValueError, TypeError, AttributeError, BadMessage) as error:
        raise UserError(
            f"--options {text[:200]} cannot be read ({type(error).__name__}: {error})",
            'give a JSON object such as {"replicas": 3, "min_replicas": 1, "where": "tcp://127.0.0.1:0"}',
        ) from error


def main(argv: list[str] | None = None) -> None:
    """Run the quorum server until another server has taken over."""
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
