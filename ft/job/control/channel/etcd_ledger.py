"""The control plane's keys on etcd: the channel's state, the orders, and the number of each agent's last recorded
report.
"""

import threading
from collections.abc import Iterable, Iterator
from dataclasses import replace

from ft.job.control.channel import KEPT_ORDERS, Record
from ft.job.control.channel.etcd_client import Etcd
from ft.job.control.channel.etcd_keys import Head, Keys
from ft.job.control.channel.etcd_wire import Entry, below, between, changed_at, delete, holds, one, put
from ft.job.messages import encode

_MOST_KEYS, _MOST_CHARACTERS = 60, 700_000
"""Limits for one transaction: etcd's defaults allow 128 operations and 1.5 MB."""
_LEASE_S = 24 * 3600
"""Lifetime in seconds of the channel's keys after the end of a run."""


class Ledger:
    """Writer of the control plane's keys; each transaction succeeds only while no later control plane has taken over.

    All methods may be called from any thread. They raise ``ConnectionError`` when another control plane has taken over
    or etcd does not answer.

    Attributes:
        head: the present state of the channel.
    """

    def __init__(self, etcd: Etcd, keys: Keys):
        self._etcd, self._keys = etcd, keys
        self._lock = threading.Lock()
        self._orders: dict[int, str] = {}
        self._taken: dict[str, int] = {}
        self._written: dict[str, int] = {}
        self._dirty: set[str] = set()
        self.head, self._head_value = self._take_over()

    def resume(self, record: Record) -> int:
        """Restore the recorded state, and return the etcd revision after which reports count.

        Reports that are present already are deleted; their agents write those that are not recorded again.
        """
        with self._lock:
            self._taken = dict(record.taken or {})
            self._orders = {record.first + i: encode(order) for i, order in enumerate(record.orders)}
            keys, following = self._keys, record.first + len(self._orders)
            cleared = self._write([delete(below(keys.orders)), delete(below(keys.boxes))], self.head)
            owned = [*map(keys.order, self._orders), *map(keys.taken, self._taken)]
            self._write_all(owned)
            self._write([], replace(self.head, is_resumed=True, first=record.first, following=following))
            return cleared

    def publish(self, text: str) -> None:
        """Append an order, which is already encoded."""
        with self._lock:
            head, number = self.head, self.head.following
            self._orders[number] = text
            changes, first = [self._put(self._keys.order(number))], head.first
            while number - first >= KEPT_ORDERS:
                del self._orders[first]
                self._written.pop(self._keys.order(first), None)
                changes.append(delete(one(self._keys.order(first))))
                first += 1
            self._write(changes, replace(head, first=first, following=number + 1), [self._keys.order(number)])

    def took(self, node: str, number: int) -> None:
        """Note that the reports of ``node`` up to ``number`` are recorded; ``settle`` writes this to etcd."""
        with self._lock:
            self._taken[node] = max(number, self._taken.get(node, 0))
            self._dirty.add(self._keys.taken(node))

    def notice(self, changes: Iterable[Entry]) -> None:
        """Find changes by other users to the control plane's keys, and reports that are recorded already.

        ``settle`` then repairs the keys and deletes these reports.
        """
        with self._lock:
            for entry in changes:
                kind, node, number = self._keys.split(entry.key)
                if kind == "report" and entry.value is not None and number <= self._taken.get(node, 0):
                    self._dirty.add(self._keys.taken(node))
                elif kind == "head" and entry.value is not None:
                    self._defer_to(entry)
                if self._expected(entry.key) is not None and entry.revision > self._written.get(entry.key, 0):
                    self._dirty.add(entry.key)

    def audit(self, there: Iterable[Entry]) -> None:
        """Do the same as ``notice`` for a complete listing of the keys, and find missing keys too."""
        found = {entry.key: entry for entry in there}
        self.notice(found.values())
        with self._lock:
            owned = [*map(self._keys.order, self._orders), *map(self._keys.taken, self._taken)]
            self._dirty.update(key for key in owned if key not in found and key in self._written)

    def settle(self) -> bool:
        """Write all pending changes; return whether there were any."""
        with self._lock:
            dirty, self._dirty = self._dirty, set()
            self._write_all(sorted(dirty))
            return bool(dirty)

    @property
    def is_dirty(self) -> bool:
        """Return whether ``settle`` has anything to write."""
        return bool(self._dirty)

    # --- inside the lock ---------------------------------------------------------------------------------------------

    def _take_over(self) -> tuple[Head, str]:
        keys, lease = self._keys, self._etcd.grant(_LEASE_S)
        while True:
            ((found,), _) = self._etcd.get(one(keys.head))
            last = keys.read_head(found[0].value) if found else None
            head = Head(last.reign + 1 if last else 1, lease=lease)
            value = keys.sign(keys.head, head.encode())
            is_untouched = changed_at(keys.head, found[0].revision if found else 0)
            done, _, revision = self._etcd.transact([is_untouched], [put(keys.head, value, lease)])
            if done:
                self._written[keys.head] = revision
                return head, value

    def _defer_to(self, found: Entry) -> None:
        head = self._keys.read_head(found.value)
        if head is not None and head.reign > self.head.reign:
            raise ConnectionError("another control plane has taken over the control channel")

    def _expected(self, key: str) -> str | None:
        kind, node, number = self._keys.split(key)
        if kind == "taken":
            return str(self._taken[node]) if node in self._taken else None
        return self._orders.get(number) if kind == "order" else (self.head.encode() if kind == "head" else None)

    def _put(self, key: str) -> dict:
        return put(key, self._keys.sign(key, self._expected(key)), self.head.lease)

    def _write_all(self, owned: Iterable[str]) -> None:
        for chunk in self._chunks(owned):
            self._write([change for key in chunk for change in self._changes(key)], self.head, chunk)

    def _changes(self, key: str) -> list[dict]:
        kind, node, _ = self._keys.split(key)
        if kind != "taken":
            return [] if kind == "head" else [self._put(key)]  # every transaction writes the head
        done = between(self._keys.report(node, 0), self._keys.report(node, self._taken[node] + 1))
        return [self._put(key), delete(done)]

    def _chunks(self, owned: Iterable[str]) -> Iterator[list[str]]:
        chunk, size = [], 0
        for key in owned:
            text = self._expected(key)
            if text is None:  # dropped in the meantime
                continue
            if chunk and (len(chunk) == _MOST_KEYS or size + len(text) > _MOST_CHARACTERS):
                yield chunk
                chunk, size = [], 0
            chunk.append(key)
            size += len(text)
        if chunk:
            yield chunk

    def _write(self, changes: list[dict], head: Head, owned: Iterable[str] = ()) -> int:
        """Apply ``changes`` to the keys ``owned`` and set the head to ``head`` in one transaction; return its etcd
        revision.

        The transaction requires that this control plane still owns the channel. An attempt that seemed to fail may have
        succeeded; then the new head is found on etcd.
        """
        keys, value = self._keys, self._keys.sign(self._keys.head, head.encode())
        condition = holds(keys.head, self._head_value)
        wanted = [*changes, put(keys.head, value, self.head.lease)]
        while True:
            done, answers, revision = self._etcd.transact([condition], wanted, [{"request_range": one(keys.head)}])
            if done:
                break
            found = [Entry.read(kv) for kv in answers[0]["response_range"].get("kvs", [])]
            if found and found[0].value == value:
                break
            if found:
                self._defer_to(found[0])
            condition = changed_at(keys.head, found[0].revision if found else 0)  # another user's value is overwritten
        self.head, self._head_value = head, value
        self._written.update(dict.fromkeys([keys.head, *owned], revision))
        return revision
