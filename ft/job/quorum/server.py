"""Process of the quorum server: an event loop that gives messages to the dispatch and sends its answers.

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
import os
import selectors
import signal
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from ft.base import bounded_json, events, token
from ft.base.errors import FtError, UserError
from ft.job.quorum import wire
from ft.job.quorum.dispatch import Act, ClaimTerm, Close, Dispatch, KeepLease, Log, NewestTerm, Peer, Send, carry_out
from ft.job.quorum.state import Options
from ft.job.quorum.wire import Channel
from ft.net.codec import BadMessage, from_json
from ft.platform import election, processes
from ft.platform.election import QUORUM, SUCCEEDED, LeaseRecord

_AUTHENTICATION_S = 5.0
"""Limit for a peer to authenticate, in seconds."""
_MOST_UNAUTHENTICATED = 128
"""Maximum number of unauthenticated connections."""
_MOST_LINES = 20
"""Maximum number of log lines per second."""


@dataclass(eq=False, kw_only=True)
class Connection(Peer):
    """One connection to the server, from a leader, an agent, or a peer that is not authenticated yet.

    Attributes:
        channel: the channel over the socket.
        address: address of the peer, "HOST:PORT".
        since: time at which the peer connected.
    """

    channel: Channel
    address: str
    since: float


class Connections:
    """All connections of the server, registered with one selector."""

    def __init__(self, selector: selectors.BaseSelector, token: str):
        self._selector, self._token = selector, token
        self._here: dict[Connection, bool] = {}  # value: whether the selector watches for writability
        self._lines, self._lines_at = 0, 0.0

    def accept(self, listener: socket.socket) -> None:
        """Accept pending connections, as many as may be unauthenticated, and drop the oldest unauthenticated ones if
        there are more. Without a free file descriptor they stay in the listen queue.
        """
        for _ in range(_MOST_UNAUTHENTICATED):
            try:
                own, (address, port) = listener.accept()
            except OSError:
                break
            try:
                channel = Channel(own, self._token, is_host=True)
            except (FtError, OSError):  # the peer has closed it already; more may be pending
                own.close()
                continue
            connection = Connection(channel=channel, address=f"{address}:{port}", since=time.monotonic())
            self._here[connection] = False
            self._selector.register(connection.channel, selectors.EVENT_READ, connection)
        self.drop_unauthenticated(time.monotonic())

    def attend(self, connection: Connection) -> None:
        """Watch whether ``connection`` is writable while bytes wait to be sent."""
        wants = connection.channel.wants_write
        if connection in self._here and wants != self._here[connection]:
            self._here[connection] = wants
            mask = selectors.EVENT_READ | (selectors.EVENT_WRITE if wants else 0)
            self._selector.modify(connection.channel, mask, connection)

    def drop(self, connection: Connection, reason: str) -> None:
        """Close ``connection``, unless it is closed already, and log the reason."""
        if connection not in self._here:
            return
        del self._here[connection]
        self._selector.unregister(connection.channel)
        connection.channel.close()
        who = connection.address
        if connection.replica is not None:
            who = f"replica {connection.replica} at {who}"
        self._say(f"{who}: {reason}")

    def drop_unauthenticated(self, now: float) -> None:
        """Disconnect peers that have not authenticated in time and, if there are too many, the oldest unauthenticated
        peers.
        """
        unknown = [connection for connection in self._here if not connection.channel.is_known]
        for place, connection in enumerate(unknown):  # oldest first
            if now - connection.since > _AUTHENTICATION_S or len(unknown) - place > _MOST_UNAUTHENTICATED:
                self.drop(connection, "no member of the run")

    def close(self) -> None:
        """Close all connections."""
        for connection in list(self._here):
            self.drop(connection, "the server ends")

    def _say(self, line: str) -> None:
        """Log a line, at a limited rate, so that unauthenticated peers cannot fill a disk."""
        now = time.monotonic()
        if now - self._lines_at > 1.0:
            self._lines, self._lines_at = 0, now
        self._lines += 1
        if self._lines <= _MOST_LINES:
            print(f"quorum server: {line}", file=sys.stderr, flush=True)


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

    options: Options
    where: str = "tcp://127.0.0.1:0"
    takes_over: bool = False


class Server:
    """I/O around :class:`ft.job.quorum.dispatch.Dispatch`: sockets, files and the clock.

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
        self._connections = Connections(self._selector, secret)
        before = election.read(run_dir, QUORUM) if given.takes_over else None
        end = before.end if before is not None else None
        term, now = election.claim_next(run_dir, str(os.getpid())), time.monotonic()
        self._dispatch, self._beat_s = Dispatch(given.options, term, now, end), given.options.limits.beat_s
        self._tended_at, self._due = now, now
        election.renew(run_dir, self._lease(term, end), QUORUM)

    def run(self) -> int:
        """Serve until a later server has taken over; return the exit code."""
        while True:
            ready = self._selector.select(max(0.0, self._due - time.monotonic()))
            for key, mask in ready:
                if key.fileobj is self._listener:
                    self._connections.accept(self._listener)
                else:
                    self._serve(key.data, mask)
            now = time.monotonic()
            if now - self._tended_at >= self._beat_s:
                self._tended_at = now
                self._connections.drop_unauthenticated(now)
            due = carry_out(self._dispatch.turn(now), self._do)
            if due is None:
                return SUCCEEDED
            self._due = due

    def close(self) -> None:
        self._connections.close()
        self._listener.close()
        self._events.close()

    def _serve(self, connection: Connection, mask: int) -> None:
        try:
            if mask & selectors.EVENT_WRITE:
                connection.channel.flush()
            if mask & selectors.EVENT_READ:
                for body in connection.channel.read():
                    carry_out(self._dispatch.take(time.monotonic(), connection, wire.unpack(body)), self._do)
            self._connections.attend(connection)
        except FtError as error:
            self._drop(connection, str(error))

    def _drop(self, connection: Connection, reason: str) -> None:
        self._connections.drop(connection, reason)
        carry_out(self._dispatch.gone(time.monotonic(), connection), self._do)

    def _do(self, act: Act) -> int | None:
        match act:
            case Send(connection, frame):
                self._send(connection, frame)
            case Close(connection, reason):
                self._connections.drop(connection, reason)
            case Log(note):
                self._events.write(events.observed(note.name, note.values))
            case NewestTerm():
                with contextlib.suppress(OSError):  # a server that asks again soon
                    return election.newest(self._run_dir)
            case ClaimTerm(least):
                return election.claim_next(self._run_dir, str(os.getpid()), least)
            case KeepLease(term, end):
                self._keep_lease(self._lease(term, end))
        return None

    def _send(self, connection: Connection, frame: bytes) -> None:
        try:
            connection.channel.send(frame)
            self._connections.attend(connection)
        except FtError as error:
            self._drop(connection, str(error))

    def _lease(self, term: int, end: tuple[int, int] | None) -> LeaseRecord:
        return LeaseRecord(term, 0, self._where, "", os.getpid(), end=end)

    def _keep_lease(self, lease: LeaseRecord) -> None:
        if election.read(self._run_dir, QUORUM) != lease:
            with contextlib.suppress(OSError):  # a full disk; connected clients do not need the file
                election.renew(self._run_dir, lease, QUORUM)


def parse_options(text: str) -> Given:
    """Parse the options of the command line.

    Raises:
        UserError: the text is no JSON object, lacks replicas, or holds options that are not valid.
    """
    try:
        values = bounded_json.loads(text)
        where, takes_over = values.pop("where", Given.where), values.pop("takes_over", False)
        wire.parse_where(where)
        return Given(from_json(Options, values).check(), where, bool(takes_over))
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
