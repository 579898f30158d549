"""The node agent's connection to the control plane, in threads, so that the agent's event loop never blocks on it.

The control plane may disappear and come back on another host, with the next term number. Therefore reports are numbered
and kept until the control plane has recorded them; after each reconnection the remaining reports are sent again. Orders
are numbered too, so that no order is carried out twice.

An agent that finds a newer life of the run than its own has to restart its workers.
"""

import contextlib
import queue
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ft.base import threads
from ft.base.errors import FtError
from ft.job.agent.first_contact import ControlPlaneWatch, find_token, leave_message
from ft.job.control.timeouts import Timeouts
from ft.job.messages import AgentBeat, AgentJoined
from ft.net.backoff import Backoff
from ft.platform import election
from ft.platform.processes import OwnPauses

_RECORD_S = 2.0
"""Seconds for which ``record`` waits until its report was sent."""
_LOOK_S, _LONGEST_LOOK_S = 0.05, 0.4
"""First and longest pause between two looks for the published address, in seconds."""
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
        unshared, pause_s = time.monotonic() + _UNSHARED_S, _LOOK_S
        while not self._ended:
            lease = election.read(self._run_dir)
            if lease is not None and lease.life >= self._life and lease.where:
                return lease
            if lease is None and self._endpoint and time.monotonic() >= unshared:
                return election.LeaseRecord(0, self._life, self._endpoint, "", 0)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_LOOK_S)
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
