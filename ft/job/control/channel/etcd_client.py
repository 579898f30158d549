"""etcd's v3 interface as JSON over HTTP, on several servers: a call that one does not answer goes to the next.

etcd carries the same calls over gRPC and, at the paths below, over plain HTTP; the latter needs nothing but the
standard library.
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

PATIENCE_S = 30.0
"""So long a call is repeated: an election is over by then, and so is a restart of a server."""
_TRY_S = 1.0
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.02, 0.5


class Etcd:
    """One caller's conversation with the servers: one call at a time, over a connection that stays.

    Args:
        patience_s: for how long a call is repeated before it fails.

    Calls raise ``ConnectionError`` when no server can do it for so long, or after ``close``; ``EtcdError`` when etcd
    refuses; ``UserError`` when it refuses this user.
    """

    def __init__(self, address: Address, patience_s: float):
        self.address, self.patience_s = address, patience_s
        self._turn = 0
        self._connection: http.client.HTTPConnection | None = None
        self._pass = ""
        self._closed = threading.Event()

    def put(self, key: str, value: str, lease: str = "0") -> int:
        """Returns the revision that this made."""
        return revision_of(self._call("kv/put", {"key": b64(key), "value": b64(value), "lease": lease}))

    def get(self, *ranges: dict) -> tuple[list[list[Entry]], int]:
        """What is in each of ``ranges`` (see ``one``, ``below``), all at the revision that is returned with it."""
        _, answers, revision = self.transact([], [{"request_range": asked} for asked in ranges])
        return [[Entry.read(kv) for kv in answer["response_range"].get("kvs", [])] for answer in answers], revision

    def transact(self, compare: list[dict], success: list[dict], failure: list[dict] | None = None):
        """Does ``success`` if all of ``compare`` holds, else ``failure``; -> (which, the answers, revision)."""
        body = {"compare": compare, "success": success, "failure": failure or []}
        answer = self._call("kv/txn", body)
        return bool(answer.get("succeeded")), answer.get("responses", []), revision_of(answer)

    def grant(self, ttl_s: int) -> str:
        """A lease: what is put under it goes ``ttl_s`` after the last ``keep_alive``."""
        return self._call("lease/grant", {"TTL": str(ttl_s)})["ID"]

    def keep_alive(self, lease: str) -> bool:
        """Whether the lease still was."""
        return int(self._call("lease/keepalive", {"ID": lease})["result"].get("TTL", 0)) > 0

    def revoke(self, lease: str) -> None:
        """What is under the lease goes now."""
        self._call("lease/revoke", {"ID": lease})

    def compact(self, revision: int) -> None:
        """Gives up the history before ``revision``, which costs memory; of all that these servers hold."""
        with contextlib.suppress(EtcdError, UserError, Compacted):  # somebody else has done it, or we may not
            self._call("kv/compaction", {"revision": str(revision)})

    def close(self) -> None:
        """Ends a call that is blocked; from any thread."""
        self._closed.set()
        shut(self._connection)

    def _call(self, path: str, body: dict) -> dict:
        data = json.dumps(body).encode()
        deadline = time.monotonic() + self.patience_s
        pause = _FIRST_PAUSE_S
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
                self._closed.wait(pause)
                pause = min(2 * pause, _LAST_PAUSE_S)
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
        self._pass = ""  # a server that was started anew has forgotten it
        if connection is not None:
            connection.close()
