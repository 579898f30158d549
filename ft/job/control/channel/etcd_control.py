"""The control plane's end of the control channel on etcd."""

import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any

from ft.base.errors import UserError
from ft.job.control.channel import ControlChannel, Posted, Record
from ft.job.control.channel.etcd_address import SCHEME, Address
from ft.job.control.channel.etcd_arrivals import Arrivals
from ft.job.control.channel.etcd_client import PATIENCE_S, Etcd
from ft.job.control.channel.etcd_keys import Keys, digest
from ft.job.control.channel.etcd_ledger import Ledger
from ft.job.control.channel.etcd_watch import Watch
from ft.job.control.channel.etcd_wire import Compacted, EtcdError, below
from ft.job.messages import encode

_PULSE_S = 0.25
"""Seconds between two signs of life of the control plane (its pulse)."""
_LEASE_S = 3
"""Lifetime of the last sign of life, in seconds."""
_RENEW_S = 1.0
"""Seconds between two renewals of the lease of the signs of life."""
_LEAVE_S = 2.0
"""Limit in seconds for the maintenance thread to end."""
_GATHER_S = 0.02
"""Seconds for which changes are collected into one transaction."""
_UPKEEP_S = 300.0
"""Seconds between two renewals of the channel's lease, with a compaction of etcd's history."""
_QUIET_S, _AWAY_S = 1.0, 2.0
"""Seconds without any change (at least the pulse) after which the next server is asked, and etcd counts as
unreachable.
"""


class EtcdControlChannel(ControlChannel):
    """The control plane's end of the channel; created by ``host``.

    While etcd is unreachable, ``receive`` does not return None: missing heartbeats then say nothing about the agents.
    """

    def __init__(self, where: str, etcd: Etcd, keys: Keys):
        self.where = where
        self._etcd, self._keys = etcd, keys
        self._ledger = Ledger(etcd, keys)
        self._pulse = _Pulse(Etcd(etcd.address, PATIENCE_S), keys, self._ledger.head.lease)
        self._watch = Watch(etcd.address, keys.prefix, _QUIET_S)
        self._reader = Etcd(etcd.address, PATIENCE_S)
        self._reports: SimpleQueue[Posted | None] = SimpleQueue()
        self._pace = _Pace()
        self._failure: Exception | None = None
        self._due = threading.Event()
        self._pulse.beat()
        self._keeper = self._start(self._look_after, "ft-channel")

    @classmethod
    def host(cls, where: str, run: str, token: str) -> "EtcdControlChannel":
        """Create the channel on etcd; see ``ft.job.control.channel.host``."""
        address = Address.parse(where)
        servers = where.removeprefix(SCHEME).partition("/")[0]
        path = f"{address.path or 'ft'}/{run}-{digest(token)}"
        etcd = Etcd(address, PATIENCE_S)
        try:
            channel = cls(f"{SCHEME}{servers}/{path}", etcd, Keys(path, token))
        except (ConnectionError, EtcdError) as error:
            raise UserError(
                f"the control plane cannot use etcd: {error}",
                f"see that a majority of {address} is up, or leave --control out",
            ) from error
        return channel

    @property
    def absences(self) -> int:
        return self._pace.absences

    def resume(self, record: Record) -> None:
        since = self._ledger.resume(record)
        arrivals = Arrivals(self._keys, record.taken or {})
        self._start(lambda: self._listen(arrivals, since + 1), "ft-inbox")

    def publish(self, order: Any) -> None:
        self._check()
        self._ledger.publish(encode(order))

    def receive(self, timeout_s: float) -> Posted | None:
        until = time.monotonic() + timeout_s
        while True:
            self._check()
            wait = until - time.monotonic()
            if wait <= 0.0 and self._pace.is_away():
                wait = _PULSE_S
            try:
                posted = self._reports.get(timeout=max(0.0, wait))
                if posted is not None:
                    return posted
            except Empty:
                if not self._pace.is_away():
                    return None

    def took(self, node: str, number: int) -> None:
        self._ledger.took(node, number)
        self._due.set()

    def close(self) -> None:
        self._fail(ConnectionError("this end of the control channel was closed"))
        self._keeper.join(_LEAVE_S)
        for part in (self._etcd, self._reader, self._watch, self._pulse):
            part.close()

    def _check(self) -> None:
        if self._pace.silence() > PATIENCE_S:
            raise ConnectionError(f"etcd at {self._etcd.address} has been silent for {PATIENCE_S:g} s")
        if self._failure is not None:
            raise ConnectionError(str(self._failure)) from self._failure

    def _fail(self, error: Exception) -> None:
        self._failure = self._failure or error
        self._reports.put(None)
        self._due.set()

    def _start(self, work: Callable[[], None], name: str) -> threading.Thread:
        def run() -> None:
            try:
                work()
            except Exception as error:  # a thread that ended in silence would leave this end deaf
                self._fail(error)

        thread = threading.Thread(target=run, name=name, daemon=True)
        thread.start()
        return thread

    def _look_after(self) -> None:
        """Write pending changes and signs of life until the channel fails or is closed. Runs on a thread of its own."""
        while self._failure is None:
            if self._due.wait(self._pulse.next_in()):
                time.sleep(
                    _GATHER_S
                )  # so that one transaction records many reports, and no order waits for each of them
            self._due.clear()
            self._ledger.settle()
            if not self._pulse.next_in():
                self._pulse.beat()
        self._pulse.end()

    def _listen(self, arrivals: Arrivals, revision: int) -> None:
        """Deliver reports, and repair the control plane's keys, as changes arrive from etcd. Runs on a thread of its
        own.
        """
        while True:
            try:
                for changes in self._watch.changes(revision):
                    for posted in (posted for entry in changes for posted in arrivals.take(entry)):
                        self._reports.put(posted)
                    if changes:
                        self._pace.hear()
                    self._ledger.notice(changes)
                    if self._ledger.is_dirty:
                        self._due.set()
            except Compacted:
                (there,), last = self._reader.get(below(self._keys.prefix))
                for entry in sorted(there, key=lambda entry: entry.revision):
                    for posted in arrivals.take(entry):
                        self._reports.put(posted)
                self._ledger.audit(there)
                self._due.set()
                revision = last + 1


class _Pace:
    """Records when etcd last delivered a change, at least the control plane's own pulse.

    Attributes:
        absences: how often etcd was unreachable and came back.
    """

    def __init__(self):
        self._heard_at = time.monotonic()
        self.absences = 0

    def hear(self) -> None:
        self.absences += self.is_away()
        self._heard_at = time.monotonic()

    def silence(self) -> float:
        return time.monotonic() - self._heard_at

    def is_away(self) -> bool:
        return self.silence() > _AWAY_S


class _Pulse:
    """Writes the signs of life of the control plane, and keeps etcd's history short.

    Args:
        etcd: client of its own.
        keys: key names and signatures.
        lease: etcd lease of the whole channel.
    """

    def __init__(self, etcd: Etcd, keys: Keys, lease: str):
        self._etcd, self._keys, self._channel_lease = etcd, keys, lease
        self._own_lease = etcd.grant(_LEASE_S)
        self._count = self._last_mark = 0
        now = time.monotonic()
        self._beat_at, self._renew_at, self._upkeep_at = now, now + _RENEW_S, now

    def next_in(self) -> float:
        """Return the seconds until the next sign of life is due."""
        return max(0.0, self._beat_at - time.monotonic())

    def beat(self) -> None:
        self._beat_at = time.monotonic() + _PULSE_S
        if time.monotonic() >= self._renew_at:
            self._renew_at = time.monotonic() + _RENEW_S
            self._etcd.keep_alive(self._own_lease)
        self._count += 1
        try:
            revision = self._put()
        except EtcdError as error:
            if not error.is_missing:
                raise
            self._own_lease = self._etcd.grant(_LEASE_S)  # this process or etcd was paused
            revision = self._put()
        if time.monotonic() >= self._upkeep_at:
            self._upkeep_at = time.monotonic() + _UPKEEP_S
            self._etcd.keep_alive(self._channel_lease)
            if self._last_mark:
                self._etcd.compact(self._last_mark)
            self._last_mark = revision

    def end(self) -> None:
        """Delete the sign of life at once, so that agents need not wait until its lease expires."""
        self._etcd.patience_s = _RENEW_S
        self._etcd.revoke(self._own_lease)

    def close(self) -> None:
        self._etcd.close()

    def _put(self) -> int:
        return self._etcd.put(self._keys.alive, self._keys.sign(self._keys.alive, str(self._count)), self._own_lease)
