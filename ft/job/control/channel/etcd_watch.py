"""A watch on etcd: the stream of changes below a prefix, with reconnection and failover to other servers."""

import contextlib
import http.client
import json
import time
from collections.abc import Iterator

from ft.base import bounded_json
from ft.job.control.channel.etcd_address import Address
from ft.job.control.channel.etcd_wire import Away, Compacted, Entry, below, checked, log_in, refused, shut
from ft.net.backoff import Backoff

_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.02, 0.5


class Watch:
    """All changes below a prefix from a revision on, in order, across reconnections.

    A paused or partitioned server is silent, and so is a server without changes. So some key below the prefix has to
    change all the time; after ``quiet_s`` seconds without a change, the next server is asked.
    """

    def __init__(self, address: Address, prefix: str, quiet_s: float):
        self._address, self._prefix, self._quiet_s = address, prefix, quiet_s
        self._turn = 0
        self._closed = False
        self._connection: http.client.HTTPConnection | None = None

    def changes(self, revision: int) -> Iterator[list[Entry]]:
        """Yield batches of changes forever; yield an empty batch whenever a connection is given up.

        All changes of one revision arrive together, but may arrive twice.

        Raises:
            ConnectionError: the watch was closed.
            Compacted: the servers no longer have the changes after ``revision``.
            UserError: the servers reject this user.
        """
        backoff = Backoff(_FIRST_PAUSE_S, _LAST_PAUSE_S)
        while True:
            try:
                for batch, following in self._listen(revision):
                    revision = following
                    backoff.reset()
                    yield batch
            except (OSError, http.client.HTTPException, ValueError, Away):
                if self._closed:
                    raise ConnectionError("this end was closed") from None
                self._turn += 1
                if self._turn % len(self._address.servers) == 0:
                    time.sleep(backoff.failed())
            yield []

    def close(self) -> None:
        """End ``changes``. May be called from any thread."""
        self._closed = True
        shut(self._connection)

    def _listen(self, revision: int) -> Iterator[tuple[list[Entry], int]]:
        server = self._address.servers[self._turn % len(self._address.servers)]
        connection = self._connection = http.client.HTTPConnection(*server, timeout=self._quiet_s)
        request = {**below(self._prefix), "start_revision": str(revision), "fragment": True}
        with contextlib.closing(connection):
            connection.connect()
            if self._closed:
                raise ConnectionError
            headers = {}
            if self._address.user:
                headers["Authorization"] = log_in(connection, self._address.user)
            connection.request("POST", "/v3/watch", json.dumps({"create_request": request}).encode(), headers)
            response = connection.getresponse()
            while line := response.readline():
                answer = checked(bounded_json.loads(line))
                if "result" in answer:
                    batch, whole = _events(answer["result"])
                    if batch:
                        revision = batch[-1].revision + whole
                        yield batch, revision
        raise Away("the server has ended the stream")


def _events(result: dict) -> tuple[list[Entry], bool]:
    """Return the changes, and whether the last revision among them is complete."""
    if result.get("canceled"):
        if int(result.get("compact_revision", 0)):
            raise Compacted(f"etcd has given up what was before revision {result['compact_revision']}")
        if "permission denied" in result.get("cancel_reason", ""):
            raise refused(result["cancel_reason"])
        raise Away(result.get("cancel_reason", "the watch was ended"))
    found = [Entry.read(event["kv"], event.get("type") == "DELETE") for event in result.get("events", [])]
    return found, not result.get("fragment")
