"""The node agent's connection to the control plane, in threads, so that the agent's event loop never blocks on it.

The control plane may disappear and come back on another host, with the next term number. Therefore reports are numbered
and kept until the control plane has recorded them; after each reconnection the remaining reports are sent again. Orders
are numbered too, so that no order is carried out twice.

An agent that finds a newer life of the run than its own has to restart its workers.

At its first contact an agent finds out soon, with proof, that there can never be one. It cannot tell a node that has
not started yet from one that will never start, so it waits for that one. But if the control plane listens and the run's
directory has no token, the directory is another one than that of node 0; and if the control plane renews its lease in
the directory and its address does not answer, the address is wrong.
"""

import contextlib
import json
import os
import queue
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ft.base import bounded_json, files, threads, token
from ft.base.errors import FtError, UserError
from ft.job.control.timeouts import Timeouts
from ft.job.messages import AgentBeat, AgentJoined, PeerUnreached, Reach
from ft.net.backoff import Backoff
from ft.platform import election, network
from ft.platform.processes import OwnPauses

_RECORD_S = 2.0
"""Seconds for which ``record`` waits until its report was sent."""
_POLL_S, _LONGEST_POLL_S = 0.05, 0.4
"""First and longest pause between two searches for the published address, in seconds."""
_FIRST_TRY_S, _LAST_TRY_S = 0.02, 1.0
"""First and longest pause between two attempts to connect, in seconds."""
_TOKEN_S = 600.0
"""Seconds to wait for the run's secret token."""
_UNSHARED_S = 1.0
"""Seconds without a published address after which the fallback address is used: the run's directory may be on another
host and not shared."""


@dataclass(frozen=True)
class Linked:
    """Event: the control plane of ``term`` answers."""

    term: int


@dataclass(frozen=True)
class Unlinked:
    """Event: the control plane does not answer any more."""

    reason: str


@dataclass(frozen=True)
class NewLife:
    """Event: another agent has begun a new life of the run, with number ``number``; all workers have to restart."""

    number: int


@dataclass(frozen=True)
class ReportRefused:
    """Event: the control plane will never accept this agent."""

    reason: str


class Uplink:
    """Posts reports to the control plane and collects its orders.

    Args:
        run_dir: the run's directory, in which the control plane publishes its address.
        endpoint: fallback address ("tcp://HOST:PORT") used while no address is published, "" if there is none.
        wake: function called, from threads, whenever ``take`` has something to return.
        node_rank: number of this node, for messages and for the search for the token.

    Attributes:
        contact_at: monotonic time at which the control plane last answered, or at which the uplink was started.
    """

    def __init__(self, run_dir: Path, endpoint: str, wake: Callable[[], None], timeouts: Timeouts, node_rank: int = 0):
        self._node_rank = node_rank
        self._run_dir, self._endpoint, self._wake, self._timeouts = run_dir, endpoint, wake, timeouts
        self._came: deque[Any] = deque()
        self._session: _Session | None = None

    @property
    def contact_at(self) -> float:
        return self._now().contact_at

    def _now(self) -> "_Session":
        assert self._session is not None, "the uplink was started"
        return self._session

    def start(self, join: Callable[[str], AgentJoined], life: int) -> None:
        """Start a session for life ``life`` of the run, and return at once.

        The session's first report is the result of ``join(token)``, where token is the run's secret token. Unsent
        reports of an earlier session are dropped.
        """
        self.close()
        self._came = deque()
        self._session = _Session(self._run_dir, self._endpoint, life, self._timeouts, self._deliver, self._node_rank)
        threading.Thread(target=self._session.run, args=(join,), name="ft-uplink", daemon=True).start()

    def post(self, report: Any) -> None:
        """Queue a report. Reports are sent in the order of the calls; without a session there is nobody to tell."""
        if self._session is not None:
            self._session.post(report)

    def record(self, report: Any, patience_s: float = _RECORD_S) -> None:
        """Queue a report and return once it was sent, or after ``patience_s`` seconds."""
        self.post(report)
        self.flush(patience_s)

    def flush(self, patience_s: float) -> None:
        """Wait until all reports were sent, for at most ``patience_s`` seconds."""
        if self._session is not None:
            out = threading.Event()
            self._session.reports.put(out)
            out.wait(patience_s)

    def take(self) -> list[Any]:
        """Return the orders and the events (``Linked``, ``ReportRefused``, ...) that came since the last call."""
        found = []
        while self._came:
            found.append(self._came.popleft())
        return found

    def check_contact(self, now: float, pauses: OwnPauses) -> None:
        """Close the present connection if the control plane has not answered over this connection for ``contact_s``
        seconds.

        A host that loses power closes no connection. Without this check, the agent would wait on the dead connection
        for ever and would not connect to a control plane that has taken over on another host.

        Args:
            now: monotonic time, in seconds.
            pauses: pauses of this agent, which do not count.
        """
        if self._now().is_stuck(now, pauses):
            self._now().break_off()

    def close(self) -> None:
        """End the session. Its further events, lost connections included, are ignored."""
        if self._session is not None:
            self._session.end()

    def _deliver(self, session: "_Session", what: Any) -> None:
        if session is self._session:
            self._came.append(what)
            self._wake()


class _Session:
    """The agent's session in one life of the run; it uses one connection after another."""

    def __init__(
        self,
        run_dir: Path,
        endpoint: str,
        life: int,
        timeouts: Timeouts,
        deliver: Callable[["_Session", Any], None],
        node_rank: int,
    ):
        self._node_rank, self._watch = node_rank, ControlPlaneWatch(run_dir)
        self._tried: election.LeaseRecord | None = None
        self._run_dir, self._endpoint, self._life, self._timeouts = run_dir, endpoint, life, timeouts
        self._deliver_event = deliver
        self.reports: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.contact_at = time.monotonic()
        self._unrecorded: deque[tuple[int, Any]] = deque()
        self._last_number = self._order = 0
        self._channel: Any = None
        self._channel_since = self.contact_at
        self._linked = self._was_linked = self._ended = False

    def post(self, report: Any) -> None:
        # drop heartbeats while there is no connection: they would be stale at the next one
        if self._linked or not isinstance(report, AgentBeat):
            self.reports.put(report)

    def is_stuck(self, now: float, pauses: OwnPauses) -> bool:
        quiet_s = pauses.between(max(self.contact_at, self._channel_since), now)
        return self._channel is not None and quiet_s > self._timeouts.contact_s

    def end(self) -> None:
        self._ended = True
        self.break_off()

    def break_off(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()
        self.reports.put(None)

    def run(self, join: Callable[[str], AgentJoined]) -> None:
        try:
            secret = find_token(self._run_dir, self._endpoint, self._node_rank, _TOKEN_S)
            joined = join(secret)
            self._retain(joined)
            backoff = Backoff(_FIRST_TRY_S, _LAST_TRY_S)
            while not self._ended:
                began = time.monotonic()
                try:
                    self._use_connection(joined.node, secret)
                except ConnectionError as error:
                    if self._linked:
                        self._announce(Unlinked(str(error)))
                    self._linked = False
                    if not self._was_linked:
                        self._watch.failed(self._tried)
                if time.monotonic() - began > _LAST_TRY_S:
                    backoff.reset()
                time.sleep(backoff.failed())
        except FtError as error:
            if not self._was_linked:
                leave_message(self._run_dir, f"node {self._node_rank} ({socket.gethostname()})", str(error))
            self._announce(ReportRefused(str(error)))
        except Exception as error:  # if this thread died silently, the agent would wait without knowing why
            self._announce(ReportRefused(f"the session with the control plane ended: {type(error).__name__}: {error}"))

    def _announce(self, what: Any) -> None:
        if not self._ended:
            self._deliver_event(self, what)

    def _retain(self, report: Any) -> tuple[int, Any]:
        """Number the report, and keep it until the control plane has recorded it."""
        self._last_number += 1
        self._unrecorded.append((self._last_number, report))
        return self._unrecorded[-1]

    def _use_connection(self, node: str, secret: str) -> None:
        """Use one connection, from its start until it breaks.

        Raises:
            ConnectionError: the connection broke.
        """
        from ft.job.control.channel import AgentChannel

        lease = self._tried = self._find()
        if lease is None:
            return
        if lease.life > self._life:
            self._announce(NewLife(lease.life))
            self._ended = True
            return
        channel = AgentChannel(lease.where, node, secret, self._timeouts.contact_s)
        self._channel_since, self._channel = time.monotonic(), channel
        try:
            self._settle(channel.taken())
            for number, report in self._unrecorded:
                channel.post(number, report)
            self._linked = self._was_linked = True
            self._announce(Linked(lease.term))
            try:
                threads.start(self._follow, (channel,), "ft-orders")
            except OSError as error:
                raise ConnectionError(error.strerror) from error
            self._send(channel)
        finally:
            channel.close()

    def _find(self) -> election.LeaseRecord | None:
        """Wait for the address of a control plane of this life or a newer one; return None if the session ends before.

        While nothing is published, the fallback address is returned after ``_UNSHARED_S`` seconds.
        """
        unshared, pause_s = time.monotonic() + _UNSHARED_S, _POLL_S
        while not self._ended:
            lease = election.read(self._run_dir)
            if lease is not None and lease.life >= self._life and lease.where:
                return lease
            if lease is None and self._endpoint and time.monotonic() >= unshared:
                return election.LeaseRecord(0, self._life, self._endpoint, "", 0)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_POLL_S)
        return None

    def _settle(self, taken: int) -> None:
        """Process an acknowledgement: the control plane has recorded the reports up to number ``taken``; drop these."""
        self.contact_at = time.monotonic()
        while self._unrecorded and self._unrecorded[0][0] <= taken:
            self._unrecorded.popleft()

    def _send(self, channel: Any) -> None:
        while not self._ended:
            report = self.reports.get()
            is_retained = not isinstance(report, threading.Event | AgentBeat | None)
            entry = self._retain(report) if is_retained else (0, report)
            if self._channel is not channel:
                if isinstance(report, threading.Event):
                    self.reports.put(report)
                raise ConnectionError("it does not answer any more")
            if isinstance(report, threading.Event):
                report.set()
            elif report is not None:
                channel.post(*entry)
            if isinstance(report, AgentBeat):
                self._settle(channel.taken())

    def _follow(self, channel: Any) -> None:
        def deliver(number: int, order: Any) -> None:
            if number >= self._order:
                self._order = number + 1
                self._announce(order)

        with contextlib.suppress(ConnectionError):
            channel.follow(deliver, self._order)
        if self._channel is channel:
            self.break_off()


# --- the first contact ------------------------------------------------------------------------------------------------


PROOF_S = 12.0
"""Seconds for which something has to be seen before it counts as proof: longer than a busy node answers late."""
_TRY_S, _PAUSE_S = 3.0, 1.0
_FOLDER = "refused"
_SCHEME = "tcp://"


def find_token(run_dir: Path, endpoint: str, node_rank: int, patience_s: float) -> str:
    """Return the run's token, once node 0 has made it.

    Args:
        run_dir: the run's directory as this node sees it.
        endpoint: "tcp://HOST:PORT" of the control plane; "": unknown.
        patience_s: longest wait in seconds, if nothing proves before that no token will come.

    Raises:
        UserError: no token has come, or node 0 has another directory.
    """
    deadline, answers_since = time.monotonic() + patience_s, None
    while True:
        with contextlib.suppress(UserError):
            return token.find(run_dir, _PAUSE_S)
        now = time.monotonic()
        if now > deadline:
            return token.find(run_dir, 0.0)
        if not endpoint or _why_not(endpoint):
            answers_since = None
            continue
        answers_since = now if answers_since is None else answers_since
        _refresh(run_dir, node_rank)
        if now - answers_since > PROOF_S:
            raise UserError(
                f"something listens at {endpoint.removeprefix(_SCHEME)}, and {run_dir} on {socket.gethostname()} has "
                "no token: it is not the directory of node 0, or another program has that port",
                "give a --run-dir that all nodes share, and mount it on every node; or set FT_TOKEN to the same value "
                "on all nodes",
            )


def _refresh(run_dir: Path, node_rank: int) -> None:
    """Change the directory: a network file system then looks up its content again instead of remembering it."""
    mark = run_dir / f".poll.{node_rank}"
    with contextlib.suppress(OSError):
        mark.touch()
        mark.unlink()


class ControlPlaneWatch:
    """Notices that the control plane is alive, and yet cannot be reached from this node.

    Args:
        run_dir: the run's directory, in which the control plane renews its lease.
    """

    def __init__(self, run_dir: Path):
        self._run_dir = run_dir
        self._first: tuple[float, election.LeaseRecord] | None = None

    def failed(self, lease: election.LeaseRecord | None) -> None:
        """Record a failed attempt of this agent to connect to the control plane for the first time.

        Raises:
            UserError: the control plane can never be reached at its address.
        """
        now, newest = time.monotonic(), election.read(self._run_dir)
        if lease is None or newest is None or not newest.where.startswith(_SCHEME):
            return
        if self._first is None or self._first[1].where != newest.where or not _why_not(newest.where):
            self._first = now, newest
            return
        since, before = self._first
        if now - since < PROOF_S or newest.count <= before.count:
            return
        where, own = newest.where.removeprefix(_SCHEME), network.interfaces()
        raise UserError(
            f"the control plane on {newest.node} is alive, and {socket.gethostname()} cannot connect to it at {where}: "
            f"{_why_not(newest.where)}; the addresses here are "
            + ", ".join(f"{address} ({name})" for name, address in own.items()),
            "give --rdzv-endpoint an address of node 0 that all nodes reach, or have the firewall let the port through",
        )


def _why_not(where: str) -> str:
    """Return why the control plane's address does not accept a connection, "" if it does."""
    host, _, port = where.removeprefix(_SCHEME).rpartition(":")
    return network.cannot_connect(host, int(port), _TRY_S)


def leave_message(run_dir: Path, node: str, reason: str) -> None:
    """Leave the reason why this node cannot take part in the run's directory, for the agents that can."""
    with contextlib.suppress(OSError):
        (run_dir / _FOLDER).mkdir(exist_ok=True)
        files.replace(run_dir / _FOLDER / f"{node}.json", json.dumps({"node": node, "reason": reason}))


class NewRefusals:
    """Finds the messages that other agents leave in the run's directory because they cannot take part.

    Messages that are there before belong to an earlier attempt to start a run in that directory.
    """

    def __init__(self, run_dir: Path):
        self._folder, self._next = run_dir / _FOLDER, 0.0
        self._known = {path.name for path in self._folder.glob("*")}

    def new(self) -> Iterator[tuple[str, str]]:
        """Yield (name of an agent, its reason) for each message that is new; looks at most once a second."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + _PAUSE_S
        with contextlib.suppress(OSError):
            for name in sorted(set(os.listdir(self._folder)) - self._known):
                if name.startswith("."):
                    continue
                self._known.add(name)
                with contextlib.suppress(ValueError, KeyError):
                    values = bounded_json.loads(files.read(self._folder / name))
                    yield str(values["node"]), str(values["reason"])


def reach(order: Reach, node: str, post: Callable[[PeerUnreached], None]) -> None:
    """Connect to the agent that the order assigns to this one, in a thread, and report it if that is impossible."""
    if node in order.peers:
        with contextlib.suppress(OSError):  # nothing is known of the peer then
            threads.start(_reach, (order, node, post), "ft-reach")


def _reach(order: Reach, node: str, post: Callable[[PeerUnreached], None]) -> None:
    peer = order.peers[node]
    address = order.addresses[peer]
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + PROOF_S
    while why := network.cannot_connect(host, int(port), _TRY_S):
        if time.monotonic() > deadline:
            post(PeerUnreached(node, peer, address, why))
            return
        time.sleep(_PAUSE_S)
