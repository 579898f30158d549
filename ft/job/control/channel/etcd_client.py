"""Client of etcd's v3 API as JSON over HTTP, with failover to the next server.

etcd serves its gRPC calls also over plain HTTP (its gRPC gateway); this needs only the standard library.
"""

import contextlib
import http.client
import json
import threading
import time

from ft.base.errors import UserError
from ft.job.control.channel.etcd_address import Address
from ft.job.control.channel.etcd_wire import (
    Away,
    Compacted,
    Entry,
    EtcdError,
    b64,
    checked,
    exchange,
    is_unknown_caller,
    log_in,
    revision_of,
    shut,
    why,
)
from ft.net.backoff import Backoff

PATIENCE_S = 30.0
"""Seconds for which a call is repeated: longer than a leader election or the restart of a server."""
_TRY_S = 1.0
"""Timeout of one attempt, in seconds."""
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.02, 0.5
"""First and longest pause between attempts, in seconds."""


class Etcd:
    """A client for one caller: one call at a time, over a persistent connection.

    Calls raise ``ConnectionError`` after ``close`` or when no server has answered for ``patience_s``, ``EtcdError``
    when etcd rejects the call, and ``UserError`` when etcd rejects this user.

    Args:
        address: servers and user.
        patience_s: seconds for which a call is repeated before it fails.
    """

    def __init__(self, address: Address, patience_s: float):
        self.address, self.patience_s = address, patience_s
        self._turn = 0
        self._connection: http.client.HTTPConnection | None = None
        self._pass = ""
        self._closed = threading.Event()

    def put(self, key: str, value: str, lease: str = "0") -> int:
        """Set a key and return the etcd revision of this change.

        Args:
            key: the key.
            value: its new value.
            lease: id of the lease with whose end the key disappears; "0": the key stays.
        """
        return revision_of(self._call("kv/put", {"key": b64(key), "value": b64(value), "lease": lease}))

    def get(self, *ranges: dict) -> tuple[list[list[Entry]], int]:
        """Return the entries of each of ``ranges`` (see ``one``, ``below``), and the common revision at which they
        were read.
        """
        _, answers, revision = self.transact([], [{"request_range": asked} for asked in ranges])
        return [[Entry.read(kv) for kv in answer["response_range"].get("kvs", [])] for answer in answers], revision

    def transact(self, compare: list[dict], success: list[dict], failure: list[dict] | None = None):
        """Apply ``success`` if all conditions in ``compare`` hold, else ``failure``.

        Returns:
            (whether the conditions held, the answers, the revision).
        """
        body = {"compare": compare, "success": success, "failure": failure or []}
        answer = self._call("kv/txn", body)
        return bool(answer.get("succeeded")), answer.get("responses", []), revision_of(answer)

    def grant(self, ttl_s: int) -> str:
        """Create a lease and return its id; etcd deletes the keys under it ``ttl_s`` seconds after the last
        ``keep_alive``.
        """
        return self._call("lease/grant", {"TTL": str(ttl_s)})["ID"]

    def keep_alive(self, lease: str) -> bool:
        """Renew a lease; return whether it still existed."""
        return int(self._call("lease/keepalive", {"ID": lease})["result"].get("TTL", 0)) > 0

    def revoke(self, lease: str) -> None:
        """End a lease, which deletes the keys under it."""
        self._call("lease/revoke", {"ID": lease})

    def compact(self, revision: int) -> None:
        """Let etcd drop the history of all its keys before ``revision``, to free memory."""
        with contextlib.suppress(EtcdError, UserError, Compacted):  # done by another client, or not permitted
            self._call("kv/compaction", {"revision": str(revision)})

    def close(self) -> None:
        """End a blocked call. May be called from any thread."""
        self._closed.set()
        shut(self._connection)

    def _call(self, path: str, body: dict) -> dict:
        data = json.dumps(body).encode()
        deadline = time.monotonic() + self.patience_s
        backoff = Backoff(_FIRST_PAUSE_S, _LAST_PAUSE_S)
        while True:
            try:
                return self._try(path, data)
            except (OSError, http.client.HTTPException, ValueError, Away) as error:
                self._hang_up()
                self._turn += 1
                if time.monotonic() > deadline:
                    raise ConnectionError(
                        f"etcd at {self.address} has not answered for {self.patience_s:g} s ({why(error)})"
                    ) from error
            if self._turn % len(self.address.servers) == 0:
                self._closed.wait(backoff.failed())
            if self._closed.is_set():
                raise ConnectionError("this end was closed")

    def _try(self, path: str, data: bytes) -> dict:
        if self._connection is None:
            self._connection = self._connect()
        answer = exchange(self._connection, path, data, self._pass)
        if is_unknown_caller(answer) and self.address.user:
            self._pass = log_in(self._connection, self.address.user)
            answer = exchange(self._connection, path, data, self._pass)
        return checked(answer)

    def _connect(self) -> http.client.HTTPConnection:
        if self._closed.is_set():
            raise ConnectionError("this end was closed")
        connection = http.client.HTTPConnection(
            *self.address.servers[self._turn % len(self.address.servers)], timeout=_TRY_S
        )
        connection.connect()
        if self.address.user and not self._pass:
            self._pass = log_in(connection, self.address.user)
        return connection

    def _hang_up(self) -> None:
        connection, self._connection = self._connection, None
        self._pass = ""  # a restarted server does not know it
        if connection is not None:
            connection.close()
