"""Client of the quorum server, used by the leader of a replica; also the notice that a replica is given up."""

import contextlib
import os
import select
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ft.base.errors import FtError, RecoverableError, UserError
from ft.job.quorum.limits import Limits
from ft.job.quorum.values import FRAME, PURPOSE, NoQuorum, Quorum, Report, pack, parse_where, unpack
from ft.net.backoff import Backoff
from ft.net.codec import from_json, to_json
from ft.net.framed import BadFrame, Stream
from ft.net.handshake import HandshakeRefused
from ft.platform import election
from ft.platform.election import QUORUM
from ft.platform.processes import OwnPauses

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.01, 0.25
"""First and longest pause between two attempts to connect, in seconds."""
_CONNECT_S = 1.0
"""Limit for one attempt to connect, in seconds."""
_CLOSE_S = 1.0
"""Limit for sending the remaining messages when this end is closed, in seconds."""
_BEAT = pack({"kind": "beat"})


class ServerLink:
    """The thread of a client that keeps one connection to the quorum server.

    Args:
        run_dir: directory that contains ``quorum.json``.
        greet: returns the packed messages that begin each connection; called in the thread.
        take: called in the thread with every message from the server.
        away: called in the thread each time that a connection or an attempt to connect has ended. Its arguments are the
            seconds since the last connection, and an error if no further attempt will be made, else None.
    """

    def __init__(
        self,
        run_dir: Path,
        token: str,
        limits: Limits,
        greet: Callable[[], list[bytes]],
        take: Callable[[dict[str, Any]], None],
        away: Callable[[float, UserError | None], None],
    ):
        self._run_dir, self._token, self._limits = run_dir, token, limits
        self._greet, self._take, self._away = greet, take, away
        self._outbox: deque[bytes] = deque()
        self._heard_at = time.monotonic()
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock, self._is_closing = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="ft-quorum", daemon=True)

    @property
    def is_started(self) -> bool:
        return self._thread.ident is not None

    @property
    def silent_s(self) -> float:
        """Return for how many seconds nothing was received from a server."""
        return time.monotonic() - self._heard_at

    def start(self) -> None:
        self._thread.start()

    def send(self, message: bytes) -> None:
        """Send a packed message if there is a connection. Never blocks.

        A message that has to survive a reconnection must be returned by ``greet``.
        """
        self._outbox.append(message)
        self._wake()

    def close(self) -> None:
        """Send the remaining messages, for one second at most, and end the thread."""
        if self._is_closing.is_set():
            return
        self._is_closing.set()
        self._wake()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(_CONNECT_S + _CLOSE_S + 1.0)
        with self._lock:
            if not self._thread.is_alive() and self._wakeup >= 0:
                os.close(self._wakeup)
                self._wakeup = -1

    def _wake(self) -> None:
        """Wake the thread, unless its event descriptor is closed: the descriptor's number may belong to another
        file by then.
        """
        with self._lock:
            if self._wakeup >= 0:
                os.eventfd_write(self._wakeup, 1)

    def _run(self) -> None:
        gone_at, backoff = time.monotonic(), Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        while not self._is_closing.is_set():
            try:
                if self._serve_one_connection():
                    gone_at = time.monotonic()
                    backoff.reset()
            except UserError as error:
                self._away(time.monotonic() - gone_at, error)
                return
            self._away(time.monotonic() - gone_at, None)
            self._is_closing.wait(backoff.failed())

    def _serve_one_connection(self) -> bool:
        """Make one connection and serve it to its end; return whether its server has proved that it knows the run's
        token.

        Raises:
            UserError: the server refuses the token.
        """
        server = election.read(self._run_dir, QUORUM)
        if server is None:
            return False
        try:
            own = socket.create_connection(parse_where(server.where), timeout=_CONNECT_S)
        except OSError:
            return False
        stream = Stream(own, self._token, PURPOSE, is_dialer=True)
        try:
            self._outbox.clear()
            for message in self._greet():
                stream.send(FRAME, bodies=[message])
            self._serve(stream, server.term)
        except HandshakeRefused:
            raise UserError(
                "the quorum server belongs to another run: it refuses this one's token",
                "start each run with a --run-dir of its own",
            ) from None
        except (FtError, ValueError, TypeError, KeyError) as error:
            print(f"quorum: the server at {server.where} sent an invalid message: {error}", file=sys.stderr)
        except (OSError, BadFrame):
            pass  # it is gone, or was no server of the run; the next attempt finds its successor
        finally:
            stream.close()
        return stream.is_member

    def _serve(self, stream: Stream, term: int) -> None:
        """Serve the connection until it breaks, a newer server has taken over, or this end is closed."""
        limits, poller = self._limits, select.poll()
        poller.register(self._wakeup, select.POLLIN)
        heard_at = beat_at = time.monotonic()
        pauses = OwnPauses(limits.beat_s)
        while True:
            mask = select.POLLIN | (select.POLLOUT if stream.has_unsent else 0)
            poller.register(stream.socket, mask)
            ready = dict(poller.poll(1e3 * max(0.0, beat_at + limits.beat_s - time.monotonic())))
            if self._wakeup in ready:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._wakeup)
            self._send_queued(stream)
            now = time.monotonic()
            pauses.look(now)
            if ready.get(stream.socket.fileno(), 0) & ~select.POLLOUT:
                heard_at = self._heard_at = now
                for message in stream.receive():
                    self._take(unpack(b"".join(message.bodies)))
            stream.flush()
            if self._is_closing.is_set():
                self._send_remaining(stream)
                return
            if now - beat_at >= limits.beat_s:
                beat_at = now
                if stream.is_member:
                    stream.send(FRAME, bodies=[_BEAT])
                if pauses.between(heard_at, now) > limits.contact_s:
                    raise ConnectionError("the server does not answer")
                newer = election.read(self._run_dir, QUORUM)
                if newer is not None and newer.term > term:
                    raise ConnectionError(f"a server of term {newer.term} has replaced this one of term {term}")

    def _send_queued(self, stream: Stream) -> None:
        while self._outbox:
            stream.send(FRAME, bodies=[self._outbox.popleft()])

    def _send_remaining(self, stream: Stream) -> None:
        self._send_queued(stream)
        deadline = time.monotonic() + _CLOSE_S
        while (stream.has_unsent or not stream.is_member) and time.monotonic() < deadline:
            select.select([stream.socket], [stream.socket] if stream.has_unsent else [], [], 0.05)
            stream.receive()
            stream.flush()


Rows = list[dict[str, str]]


@dataclass(frozen=True)
class QuestionState:
    """What a leader knows of its question for a quorum at one moment.

    Attributes:
        asked: its report that has no answer yet, or None.
        asked_s: seconds since it was sent.
        last: the last quorum that it has received, or None.
        silent_s: seconds since anything was received from the server.
        waits: replica -> why the server waits for its report; None: the server has not answered.
        following: number of the quorum that the server forms next; None: the server has not answered.
    """

    asked: Report | None
    asked_s: float
    last: Quorum | None
    silent_s: float
    waits: Mapping[int, str] | None = None
    following: int | None = None


class QuorumClient:
    """Client of a replica's leader, which asks for the quorum of each step.

    The client finds the server through ``quorum.json`` in the run's directory, and finds the next server when that one
    dies.

    Args:
        limits: timeouts; the defaults if None.
    """

    def __init__(self, run_dir: str | Path, replica: int, life: int, token: str, limits: Limits | None = None):
        self.replica, self.life = replica, life
        self._limits = limits or Limits()
        self._lock = threading.Lock()
        self._own_rows: Rows | None = None
        self._rows: dict[int, tuple[int, Rows]] = {}
        self._last: Quorum | None = None
        self._asked: tuple[Report, Future[Quorum]] | None = None
        self._asked_at = 0.0
        self._waits: tuple[int, dict[int, str]] | None = None
        self._told = threading.Event()
        self._never: FtError | None = None
        self._left = self._aside = b""
        self._link = ServerLink(Path(run_dir), token, self._limits, self._greet, self._take, self._away)

    def arriving(self) -> None:
        """Announce that this life has started and will call :meth:`hello` soon.

        Optional; to be called before :meth:`hello`. Returns at once.
        """
        self._link.start()

    def hello(self, rows: Rows, steps: int = 0) -> None:
        """Announce that this life is ready, with the addresses of its ranks.

        To be called once, before :meth:`ask`; returns at once.

        Args:
            rows: one dictionary of addresses for each rank of the replica, in rank order, for the other replicas:
                {"ring": address for the gradient rings, "fetch": address for fetching state}.
            steps: number of committed steps in the state that this life begins with; 0: it has no state, or the initial
                one. The server does not go back behind them without asking this replica.
        """
        if self._own_rows is not None:
            raise FtError("hello is said once in a life")
        self._own_rows, self._steps = rows, steps
        if not self._link.is_started:
            self._link.start()
            return
        for frame in self._greet():
            self._link.send(frame)

    def ask(self, report: Report) -> "Future[Quorum]":
        """Ask for the quorum of the next step; returns at once, whatever the network does.

        Returns:
            A future of the quorum. It raises NoQuorum if there will be none for this replica, RecoverableError if no
                server was found for ``Limits.away_s`` or if ``ask`` was called again, and UserError if the token is
                refused.
        """
        future: Future[Quorum] = Future()
        future.set_running_or_notify_cancel()
        with self._lock:
            report = replace(report, number=self._last.number if self._last else 0)
            previous, self._asked = self._asked, (report, future)
            self._asked_at = time.monotonic()
            self._aside = b""
            never = self._never
            if never is not None:
                self._asked = None
        if previous is not None:
            previous[1].set_exception(RecoverableError("it was asked again"))
        if never is not None:
            future.set_exception(never)
        else:
            self._link.send(_report_frame(report))
        return future

    def inspect(self, within_s: float) -> QuestionState:
        """Return what is known of the present question; the server is asked whom it waits for, and has
        ``within_s`` seconds to answer.
        """
        with self._lock:
            asked, since, last = self._asked, self._asked_at, self._last
            self._waits = None
            self._told.clear()
        if asked is None:
            return QuestionState(None, 0.0, last, self._link.silent_s)
        self._link.send(pack({"kind": "inspect"}))
        self._told.wait(within_s)
        view = QuestionState(asked[0], time.monotonic() - since, last, self._link.silent_s)
        told = self._waits
        return view if told is None else replace(view, following=told[0], waits=told[1])

    def rows(self, replica: int, life: int) -> Rows:
        """Return the addresses that life ``life`` of ``replica`` has passed to ``hello``.

        They are known for all members of a quorum before the future of this quorum is done.

        Raises:
            FtError: that life is not a member of a quorum that was received.
        """
        with self._lock:
            if replica == self.replica and life == self.life and self._own_rows is not None:
                return self._own_rows
            found = self._rows.get(replica)
        if found is None or found[0] != life:
            raise FtError(f"the addresses of life {life} of replica {replica} are not known: it is in no quorum")
        return found[1]

    def aside(self) -> None:
        """Announce that the next report will take longer than a step, so that the server waits longer for this
        replica.
        """
        with self._lock:
            self._aside = pack({"kind": "aside"})
        self._link.send(self._aside)

    def leave(self, reason: str) -> None:
        """Announce that this life is over, so that the others need not wait for it. A pending ``ask`` fails."""
        self._left = pack({"kind": "leave", "reason": reason})
        self._fail(RecoverableError(f"this replica has left: {reason}"))
        self._link.send(self._left)

    def abandon(self, reason: str) -> None:
        """Let a pending ``ask`` fail; the server is told nothing."""
        self._fail(RecoverableError(reason))

    def close(self) -> None:
        """Close the connection after sending what the network accepts within a second. A pending ``ask`` fails."""
        self._link.close()
        self._fail(RecoverableError("the client was closed"))

    # --- in the link's thread ---------------------------------------------------------------------------------------

    def _greet(self) -> list[bytes]:
        if self._own_rows is None:
            return [_notice(self.replica, what="arriving", life=self.life)]
        with self._lock:
            last = to_json(self._last) if self._last is not None else None
            known = {str(replica): life for replica, (life, _) in self._rows.items()}
            asked, said = self._asked, (self._aside, self._left)
        hello = {"kind": "hello", "replica": self.replica, "life": self.life, "rows": self._own_rows}
        hello["steps"] = self._steps
        frames = [pack(hello | {"last": last, "known": known})]
        if asked is not None:
            frames.append(_report_frame(asked[0]))
        return [*frames, *filter(None, said)]

    def _take(self, message: dict[str, Any]) -> None:
        kind = message["kind"]
        if kind == "quorum":
            self._answered(from_json(Quorum, message.get("quorum")))
        elif kind == "rows":
            with self._lock:
                self._rows[int(message["replica"])] = (int(message["life"]), message["rows"])
        elif kind == "inspected":
            waits = {int(replica): str(why) for replica, why in message["waits"].items()}
            self._waits = int(message["next"]), waits
            self._told.set()
        elif kind == "none":
            self._fail(NoQuorum(str(message.get("reason"))))

    def _answered(self, quorum: Quorum) -> None:
        with self._lock:
            if self._asked is None or quorum.lives.get(self.replica) != self.life:
                return  # an answer to a question that was asked again meanwhile
            if self._last is not None and quorum.number <= self._last.number:
                return
            self._last, future, self._asked = quorum, self._asked[1], None
        future.set_result(quorum)

    def _away(self, seconds: float, error: UserError | None) -> None:
        if error is not None:
            self._never = error
            self._fail(error)
        elif seconds > self._limits.away_s:
            self._fail(RecoverableError(f"no quorum server is to be found for {seconds:.0f} s"))

    def _fail(self, error: FtError) -> None:
        with self._lock:
            asked, self._asked = self._asked, None
        if asked is not None:
            asked[1].set_exception(error)


GIVEN_UP, REPAIRS = "given up", "repairs"
"""What a notice says of a replica: no server is to wait for it any longer; or it replaces a lost worker, and servers
wait for it as long as the notice is open, for ``Limits.repair_s`` at most.
"""


class Notice:
    """Tells every server of the run something about a replica, until it is closed.

    Args:
        life: its last life, or -1 if it never had one.
        what: GIVEN_UP or REPAIRS.
    """

    def __init__(self, run_dir: str | Path, replica: int, life: int, token: str, what: str, reason: str = ""):
        notice = _notice(replica, what=what, life=life, reason=reason)
        self._link = ServerLink(Path(run_dir), token, Limits(), lambda: [notice], _ignore, _ignore)
        self._link.start()

    def close(self) -> None:
        """End the connection."""
        self._link.close()


def _report_frame(report: Report) -> bytes:
    return pack({"kind": "report", "report": to_json(report)})


def _notice(replica: int, **values: Any) -> bytes:
    return pack({"kind": "notice", "replica": replica, **values})


def _ignore(*_values: Any) -> None:
    pass
