"""The agent's end of the control channel on etcd."""

import threading
import time
from collections.abc import Callable
from typing import Any

from ft.base.errors import UserError
from ft.job.control.channel import AgentChannel
from ft.job.control.channel.etcd_address import Address
from ft.job.control.channel.etcd_client import PATIENCE_S, Etcd
from ft.job.control.channel.etcd_keys import Head, Keys, pack
from ft.job.control.channel.etcd_watch import Watch
from ft.job.control.channel.etcd_wire import Compacted, Entry, EtcdError, below, between, one
from ft.job.messages import decode, encode

QUIET_S = 1.0
"""Seconds without a sign of life of the control plane after which the next etcd server is asked."""
GRACE_S = 1.0
"""Seconds that a missing sign of life is tolerated: another user of etcd may have deleted it, and the control plane
writes it again within this time.
"""
_POLL_S = 0.02
"""Seconds between two reads of the channel's state while this end waits for the control plane."""
_LARGEST_NUMBER = 10**16 - 1


class EtcdAgentChannel(AgentChannel):
    """The agent's end of the channel; created by ``connect``."""

    def __init__(self, etcd: Etcd, keys: Keys, node: str, head: Head):
        self._etcd, self._keys, self._node, self._head = etcd, keys, node, head
        self._watch = Watch(etcd.address, keys.down, QUIET_S)
        self._reader = Etcd(etcd.address, PATIENCE_S)
        self._posted: dict[int, tuple[int, str]] = {}
        self._gone = threading.Event()

    @classmethod
    def connect(cls, where: str, node: str, token: str, timeout_s: float) -> "EtcdAgentChannel":
        """Connect to etcd; see ``ft.job.control.channel.connect``."""
        address = Address.parse(where)
        etcd, keys = Etcd(address, timeout_s), Keys(address.path, token)
        head = _find(etcd, keys, time.monotonic() + timeout_s)
        etcd.patience_s = PATIENCE_S
        return cls(etcd, keys, node, head)

    def post(self, number: int, report: Any) -> None:
        self._check()
        if number:
            self._put(number, encode(report))
            return
        key = self._keys.beat(self._node)
        beat = pack(time.monotonic_ns(), encode(report))
        self._put_while_leased(lambda: self._etcd.put(key, self._keys.sign(key, beat), self._head.lease))

    def taken(self) -> int:
        deadline = time.monotonic() + PATIENCE_S
        alone_since = None
        while True:
            self._check()
            number, is_alive = self._poll()
            if self._head.is_resumed and is_alive:
                return number
            alone_since = None if is_alive else alone_since or time.monotonic()
            if alone_since is not None and time.monotonic() - alone_since > GRACE_S:
                raise self._lost("the control plane is gone")
            if time.monotonic() > deadline:
                raise self._lost(f"the control plane has not resumed the channel within {PATIENCE_S:g} s")
            self._gone.wait(_POLL_S)

    def follow(self, callback: Callable[[int, Any], None], start: int) -> None:
        follower = _Follower(self._keys, self._head.reign, callback, start)
        revision = None
        while True:
            if revision is None:
                revision = follower.begin(self._reader) + 1
            try:
                for batch in self._watch.changes(revision):
                    follower.take(batch)
            except Compacted:
                revision = None

    def close(self) -> None:
        self._gone.set()
        for part in (self._etcd, self._reader, self._watch):
            part.close()

    def _check(self) -> None:
        if self._gone.is_set():
            raise ConnectionError("this end of the control channel was closed, or another control plane has taken over")

    def _lost(self, reason: str) -> ConnectionError:
        self._gone.set()
        return ConnectionError(reason)

    def _put(self, number: int, text: str) -> None:
        key = self._keys.report(self._node, number)
        value = self._keys.sign(key, text)
        revision = self._put_while_leased(lambda: self._etcd.put(key, value, self._head.lease))
        self._posted[number] = revision, text

    def _put_while_leased(self, put: Callable[[], int]) -> int:
        """Call ``put``, and return its result.

        Raises:
            ConnectionError: the lease of the channel has expired, so no control plane has been alive for long.
        """
        try:
            return put()
        except EtcdError as error:
            if error.is_missing:
                raise self._lost("the control plane has been gone for long") from error
            raise

    def _poll(self) -> tuple[int, bool]:
        """Return the number of the last recorded report, and whether the control plane is alive. Rewrite missing
        reports of this agent.
        """
        keys, taken_key = self._keys, self._keys.taken(self._node)
        own = {**below(keys.reports(self._node)), "keys_only": True}
        (heads, alive, taken, reports), _ = self._etcd.get(one(keys.head), one(keys.alive), one(taken_key), own)
        head = keys.read_head(heads[0].value) if heads else None
        if head is not None and head.reign > self._head.reign:
            raise self._lost("another control plane has taken over")
        if head is not None and head.reign == self._head.reign:
            self._head = head
        number = keys.read_number(taken_key, taken[0].value) if taken else 0
        there = {entry.key: entry.revision for entry in reports}
        self._posted = {n: posted for n, posted in self._posted.items() if n > number}
        for n, (revision, text) in sorted(self._posted.items()):
            if there.get(keys.report(self._node, n)) != revision:
                self._put(n, text)
        return number, bool(alive) and keys.read(keys.alive, alive[0].value) is not None


class _Follower:
    """Delivers orders in sequence.

    Args:
        keys: key names and signatures.
        reign: number of the control plane that is followed (``Head.reign``).
        callback: called with the number and the order.
        start: number of the first order to deliver.
    """

    def __init__(self, keys: Keys, reign: int, callback: Callable[[int, Any], None], start: int):
        self._keys, self._reign, self._callback = keys, reign, callback
        self._next = start
        self._head: Head | None = None
        self._orders: dict[int, Any] = {}
        self._heard_at = time.monotonic()
        self._dead_at: float | None = None

    def begin(self, etcd: Etcd) -> int:
        """Process the orders that exist now; return the revision at which they were read."""
        orders = between(self._keys.order(self._next), self._keys.order(_LARGEST_NUMBER))
        (heads, found), revision = etcd.get(one(self._keys.head), orders)
        self.take([*heads, *found])
        return revision

    def take(self, entries: list[Entry]) -> None:
        """Process changed entries and deliver the orders that are next in sequence.

        Raises:
            ConnectionError: the control plane is gone, or no change was received for ``PATIENCE_S`` seconds.
        """
        now = time.monotonic()
        for entry in entries:
            kind, _, number = self._keys.split(entry.key)
            text = self._keys.read(entry.key, entry.value)
            if kind == "alive" and (text is not None or entry.value is None):
                self._heard_at, self._dead_at = now, (now if entry.value is None else None)
            elif kind == "head" and text is not None:
                self._update_head(self._keys.read_head(entry.value))
            elif kind == "order" and text is not None and number >= self._next:
                self._orders[number] = decode(text)
            elif kind == "order" and entry.value is None:
                self._orders.pop(number, None)
        if self._dead_at is not None and now - self._dead_at > GRACE_S:
            raise ConnectionError("the control plane is gone")
        if now - self._heard_at > PATIENCE_S:
            raise ConnectionError(f"etcd has had no sign of life of the control plane for {PATIENCE_S:g} s")
        self._deliver()

    def _update_head(self, head: Head) -> None:
        if head.reign > self._reign:
            raise ConnectionError("another control plane has taken over")
        if head.reign == self._reign and head.is_resumed and (self._head is None or head.first >= self._head.first):
            self._head = head

    def _deliver(self) -> None:
        # Before the control plane has resumed the channel, its orders may be those of a previous control plane.
        if self._head is None:
            return
        if self._head.first > self._next:
            self._next = self._head.first
            self._orders = {n: order for n, order in self._orders.items() if n >= self._next}
        while self._next in self._orders:
            number, self._next = self._next, self._next + 1
            self._callback(number, self._orders.pop(number))


def _find(etcd: Etcd, keys: Keys, deadline: float) -> Head:
    """Wait for a live control plane, and return the state of its channel.

    Raises:
        ConnectionError: there is none at the deadline.
        UserError: all entries were written with another token.
    """
    while True:
        (heads, alive, others), _ = etcd.get(one(keys.head), one(keys.alive), {**below(keys.down), "limit": "8"})
        head = keys.read_head(heads[0].value) if heads else None
        if head is not None and alive and keys.read(keys.alive, alive[0].value) is not None:
            return head
        if time.monotonic() > deadline:
            where = f"etcd at {etcd.address} under {keys.prefix}"
            if others and all(keys.read(entry.key, entry.value) is None for entry in others):
                raise UserError(
                    f"the keys of {where} were written with another token",
                    "start each run with a --run-dir and a token of its own",
                )
            raise ConnectionError(f"there is no control plane at {where}")
        time.sleep(_POLL_S)
