"""Client of a run's store, which torch's process groups use like one of torch's own stores."""

import socket
import threading
import time
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from ft.base.errors import FtError, UserError
from ft.net.backoff import Backoff
from ft.net.framed import BadFrame, FramedChannel, Mark, Message
from ft.net.handshake import NotAMember, Refused
from ft.net.store.server import FAILED, LATE, PURPOSE, VERY_LONG

_GRACE_S = 10.0
"""How much longer than a request may wait the server has for its answer, in seconds."""
_MARK = Mark()
_OPEN: set["StoreConnection"] = set()
"""Connections in use. torch's process groups hold only the C++ half of a store, which calls the Python half."""


class StoreConnection(dist.Store):
    """A connection to a ``StoreServer``. Blocked calls can be ended from outside. Threads take turns.

    Its methods are those of ``torch.distributed.Store``. They raise ``DistStoreError`` if a key is not set within the
    timeout, and ConnectionError if the connection is lost.

    Args:
        address: ``StoreServer.address``, as host:port.
        timeout_s: timeout of connecting and of blocking calls, in seconds.

    Attributes:
        is_broken: whether ``break_off`` was called.

    Raises:
        ConnectionError: no server answers at ``address``, or it is not the store of a run.
        UserError: the server refuses the token.
    """

    def __init__(self, address: str, token: str, timeout_s: float = 30.0):
        super().__init__()
        self._address, self._token = address, token
        self._lock = threading.Lock()
        self.is_broken = False
        self._channel, self._patience_s = _connect(address, token, timeout_s), timeout_s
        self.set_timeout(timedelta(seconds=timeout_s))
        _OPEN.add(self)

    def break_off(self) -> None:
        """Close the connection. A call that is blocked in the store, in any thread, fails, and so do later calls."""
        self.is_broken = True
        self.close()

    def close(self) -> None:
        """Close the connection."""
        self._channel.shutdown()
        _OPEN.discard(self)

    def clone(self) -> "StoreConnection":
        """Return another connection to the same store, with the same timeout."""
        return StoreConnection(self._address, self._token, self.timeout.total_seconds())

    def set(self, key: str, value: bytes | str) -> None:
        self._ask(b"set ", [key], [value])

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def add(self, key: str, amount: int) -> int:
        return int(self._ask(b"add ", [key], amount=amount).words["value"])

    def compare_set(self, key: str, expected: bytes | str, desired: bytes | str) -> bytes:
        return self._ask(b"cas ", [key], [expected, desired]).bodies[0]

    def append(self, key: str, value: bytes | str) -> None:
        self._ask(b"app ", [key], [value])

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._ask(b"wait", keys, wait=timeout or self.timeout)

    def check(self, keys: list[str]) -> bool:
        return bool(self._ask(b"has ", keys).words["value"])

    def delete_key(self, key: str) -> bool:
        return bool(self._ask(b"del ", [key]).words["value"])

    def num_keys(self) -> int:
        return int(self._ask(b"num ", []).words["value"])

    def list_keys(self) -> list[str]:
        return [body.decode() for body in self._ask(b"list", []).bodies]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return self._ask(b"get ", keys, wait=self.timeout).bodies

    def multi_set(self, keys: list[str], values: Sequence[bytes | str]) -> None:
        self._ask(b"set ", keys, values)

    def queue_push(self, key: str, value: bytes | str) -> None:
        self._ask(b"push", [key], [value])

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        return self._ask(b"pop ", [key], wait=self.timeout if block else timedelta(0)).bodies[0]

    def has_extended_api(self) -> bool:
        return True

    deleteKey, getNumKeys = delete_key, num_keys  # the names by which C++ calls these two

    def _ask(
        self,
        kind: bytes,
        keys: list[str],
        values: Sequence[bytes | str] = (),
        wait: timedelta = timedelta(0),
        **words: int,
    ) -> Message:
        """Send a request and return the answer."""
        bodies = [value.encode() if isinstance(value, str) else bytes(value) for value in values]
        wait_s = wait.total_seconds()
        try:
            with self._lock:
                self._be_patient(0.0 if wait >= VERY_LONG else wait_s + _GRACE_S)
                self._channel.send(kind, _MARK, {"keys": list(keys), "wait_s": wait_s, **words}, *bodies)
                answer = self._channel.receive()
        except (OSError, BadFrame) as error:
            self.close()
            raise ConnectionError(f"the connection to the store at {self._address} is lost: {error}") from error
        if answer.kind == LATE:
            raise dist.DistStoreError(f"wait timeout after {wait_s * 1000:.0f}ms, keys: {', '.join(keys)[:200]}")
        if answer.kind == FAILED:
            raise FtError(f"the store at {self._address} refuses a request: {answer.words.get('problem')}")
        return answer

    def _be_patient(self, limit_s: float) -> None:
        if limit_s != self._patience_s:
            self._patience_s = limit_s
            self._channel.be_patient(limit_s)


def _connect(address: str, token: str, timeout_s: float) -> FramedChannel:
    """Return an authenticated channel to the server at ``address``; see ``StoreConnection``."""
    host, _, port = address.rpartition(":")
    until, backoff = time.monotonic() + timeout_s, Backoff(0.01, 0.5)
    while True:
        try:
            return _dial(host, int(port), token, max(0.1, until - time.monotonic()))
        except NotAMember as error:
            raise ConnectionError(f"{address} is no store of a run: {error}") from error
        except Refused as error:
            raise UserError(
                f"the store at {address} belongs to another run: it refuses this one's token",
                "start each run with a --run-dir and an endpoint of its own",
            ) from error
        except OSError as error:
            # A server with too many callers closes some of the connections: try again.
            is_final = isinstance(error, ConnectionRefusedError) or not isinstance(error, ConnectionError)
            if is_final or time.monotonic() > until:
                raise ConnectionError(f"{address} cannot be reached: {error}") from error
            time.sleep(backoff.failed())


def _dial(host: str, port: int, token: str, limit_s: float) -> FramedChannel:
    connection = socket.create_connection((host, port), timeout=limit_s)
    try:
        channel = FramedChannel(connection, limit_s)
        channel.dial(token, PURPOSE, limit_s)
    except BaseException:
        connection.close()
        raise
    return channel
