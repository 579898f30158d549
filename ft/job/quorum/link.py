"""Connection of a client to the quorum server: a thread that keeps it and reconnects with backoff when it breaks."""

import contextlib
import os
import select
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ft.base.errors import FtError, UserError
from ft.job.quorum import wire
from ft.job.quorum.limits import Limits
from ft.job.quorum.wire import Broken, Channel
from ft.net.backoff import Backoff
from ft.platform import election
from ft.platform.election import QUORUM
from ft.platform.standstill import OwnPauses

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.01, 0.25
"""First and longest pause between two attempts to connect, in seconds."""
_CONNECT_S = 1.0
"""Limit for one attempt to connect, in seconds."""
_CLOSE_S = 1.0
"""Limit for sending the remaining messages when this end is closed, in seconds."""
_BEAT = wire.pack({"kind": "beat"})


class Link:
    """The thread of a client that keeps one connection to the quorum server.

    Args:
        run_dir: directory that contains ``quorum.json``.
        token: secret of the run.
        limits: timeouts.
        greet: returns the frames that begin each connection; called in the thread.
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

    def send(self, frame: bytes) -> None:
        """Send a frame if there is a connection. Never blocks.

        A frame that has to survive a reconnection must be returned by ``greet``.
        """
        self._outbox.append(frame)
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
            own = socket.create_connection(wire.parse_where(server.where), timeout=_CONNECT_S)
        except OSError:
            return False
        channel = Channel(own, self._token, is_host=False)
        try:
            self._outbox.clear()
            for frame in self._greet():
                channel.send(frame)
            self._serve(channel, server.term)
        except UserError:
            raise
        except (FtError, ValueError, TypeError, KeyError) as error:
            if not isinstance(error, Broken):
                print(f"quorum: the server at {server.where} sent an invalid message: {error}", file=sys.stderr)
        finally:
            channel.close()
        return channel.is_known

    def _serve(self, channel: Channel, term: int) -> None:
        """Serve the connection until it breaks, a newer server has taken over, or this end is closed."""
        limits, poller = self._limits, select.poll()
        poller.register(self._wakeup, select.POLLIN)
        heard_at = beat_at = time.monotonic()
        pauses = OwnPauses(limits.beat_s)
        while True:
            mask = select.POLLIN | (select.POLLOUT if channel.wants_write else 0)
            poller.register(channel, mask)
            ready = dict(poller.poll(1e3 * max(0.0, beat_at + limits.beat_s - time.monotonic())))
            if self._wakeup in ready:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._wakeup)
            self._send_queued(channel)
            now = time.monotonic()
            pauses.look(now)
            if ready.get(channel.fileno(), 0) & ~select.POLLOUT:
                heard_at = self._heard_at = now
                for body in channel.read():
                    self._take(wire.unpack(body))
            channel.flush()
            if self._is_closing.is_set():
                self._send_remaining(channel)
                return
            if now - beat_at >= limits.beat_s:
                beat_at = now
                if channel.is_known:
                    channel.send(_BEAT)
                if pauses.between(heard_at, now) > limits.contact_s:
                    raise Broken("the server does not answer")
                newer = election.read(self._run_dir, QUORUM)
                if newer is not None and newer.term > term:
                    raise Broken(f"a server of term {newer.term} has replaced this one of term {term}")

    def _send_queued(self, channel: Channel) -> None:
        while self._outbox:
            channel.send(self._outbox.popleft())

    def _send_remaining(self, channel: Channel) -> None:
        self._send_queued(channel)
        deadline = time.monotonic() + _CLOSE_S
        while (channel.wants_write or not channel.is_known) and time.monotonic() < deadline:
            select.select([channel], [channel] if channel.wants_write else [], [], 0.05)
            for _ in channel.read():
                pass
            channel.flush()
