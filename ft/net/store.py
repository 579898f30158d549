"""A key-value store over TCP for the members of a run, who prove with the run's token that they belong to it.

Process groups rendezvous in it, and the control channel uses it. torch's own TCPStore serves whoever reaches its port.

The server is a thread that carries out the requests of authenticated clients on one of torch's stores. A request is a
message of :mod:`ft.net.framed`: its kind says what to do, its words name keys, its byte strings are values. Each
request gets one answer. One that waits for keys, or for an entry of a queue, is answered when they are there, or with
``LATE`` after the seconds that it names. Nobody else writes to torch's store, so that no key appears unnoticed.
"""

import heapq
import itertools
import os
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from ft.base.errors import FtError, UserError
from ft.net.backoff import Backoff
from ft.net.framed import BadFrame, FramedChannel, Mark, ReceivedMessage, Stream
from ft.net.handshake import HandshakeRefused, NotAMember
from ft.net.listener import Acceptor
from ft.platform import sockets

PURPOSE = "ft-store-3"
DONE, LATE, FAILED = b"done", b"late", b"fail"
VERY_LONG = timedelta(days=20)
"""The longest timeout that torch's stores can represent: milliseconds in 31 bits."""
_ATTEMPTS = 10


@dataclass(eq=False)
class _Request:
    """A request of a client.

    Attributes:
        waits_for: the key without which it cannot be answered; None: it does not wait.
    """

    peer: Stream
    message: ReceivedMessage
    keys: list[str]
    waits_for: str | None = None


class StoreServer:
    """Serves a store from this process, to members of the run only.

    Args:
        host: name or IPv4 address at which clients reach this node.
        port: port to listen on; 0: any free one.
        contents: the store of torch's that holds the entries; None: one in this process's memory.

    Attributes:
        address: "host:port", for ``StoreConnection``.

    Raises:
        UserError: the port is taken.
    """

    def __init__(self, host: str, port: int, token: str, contents: Any = None):
        try:
            listener = socket.create_server(("", port), backlog=1024)
        except OSError as error:
            problem = f"port {port} cannot be listened on: {error.strerror}"
            raise UserError(problem, "give --rdzv-endpoint another port") from error
        self.address = f"{host}:{listener.getsockname()[1]}"
        self._contents: Any = contents if contents is not None else c10d.HashStore()
        self._acceptor = Acceptor(listener, token, PURPOSE, "store")
        self._waiting: dict[str, list[_Request]] = defaultdict(list)
        self._of_peer: dict[Stream, _Request] = {}
        self._limits: list[tuple[float, int, _Request]] = []
        self._numbers = itertools.count()
        self._ends = False
        self._thread = threading.Thread(target=self._run, name="ft-store", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the store and all connections to it."""
        self._ends = True
        self._acceptor.wake()
        self._thread.join()

    def _run(self) -> None:
        while not self._ends:
            wait_s = max(0.0, self._limits[0][0] - time.monotonic()) if self._limits else None
            messages, gone = self._acceptor.turn(wait_s)
            for peer, message in messages:
                self._take(peer, message)
            for peer in gone:
                if peer in self._of_peer:
                    self._forget(self._of_peer[peer])
            self._give_up(time.monotonic())
        self._acceptor.close()

    def _take(self, peer: Stream, message: ReceivedMessage) -> None:
        try:
            request = _Request(peer, message, [str(key) for key in message.words["keys"]])
            wait_s = float(message.words.get("wait_s", 0.0))
        except (KeyError, ValueError, TypeError) as error:
            self._acceptor.answer(peer, FAILED, {"problem": f"no request of a store: {error!r}"[:200]})
            return
        self._proceed(request)
        if request.waits_for is not None:
            self._of_peer[peer] = request
            if wait_s < VERY_LONG.total_seconds():
                heapq.heappush(self._limits, (time.monotonic() + wait_s, next(self._numbers), request))

    def _proceed(self, request: _Request) -> None:
        """Answer a request, or let it wait for a key."""
        try:
            request.waits_for = self._missing(request)
            if request.waits_for is not None:
                self._waiting[request.waits_for].append(request)
                return
            kind, (words, values) = DONE, self._carry_out(request.message, request.keys)
        except Exception as error:  # such as a sum of values that are no numbers: the client's mistake
            kind, words, values = FAILED, {"problem": f"{error}".splitlines()[0][:200]}, []
        self._of_peer.pop(request.peer, None)
        self._acceptor.answer(request.peer, kind, words, values)

    def _missing(self, request: _Request) -> str | None:
        """Return the first key that a request has to wait for."""
        store, keys = self._contents, request.keys
        match request.message.kind:
            case b"get " | b"wait" if keys and not store.check(keys):
                return next(key for key in keys if not store.check([key]))
            case b"pop " if not store.queue_len(keys[0]):
                return keys[0]
        return None

    def _carry_out(self, message: ReceivedMessage, keys: list[str]) -> tuple[dict[str, Any], list[bytes]]:
        """Carry out a request that need not wait, and return the words and the byte strings of the answer."""
        store, values = self._contents, message.bodies
        match message.kind:
            case b"get ":
                return {}, [store.get(key) for key in keys]
            case b"pop ":
                return {}, [store.queue_pop(keys[0], block=False)]
            case b"list":
                return {}, [key.encode() for key in store.list_keys()]
            case b"wait":
                return {}, []
            case b"has ":
                return {"value": store.check(keys)}, []
            case b"del ":
                return {"value": store.delete_key(keys[0])}, []
            case b"num ":
                return {"value": store.num_keys()}, []
        answer: tuple[dict[str, Any], list[bytes]] = {}, []
        match message.kind:
            case b"set ":
                for key, value in zip(keys, values, strict=True):
                    store.set(key, value)
            case b"app ":
                store.append(keys[0], values[0])
            case b"push":
                store.queue_push(keys[0], values[0])
            case b"add ":
                if store.check(keys):
                    int(store.get(keys[0]))  # TCPStore ends the connection of whoever adds to what is no number
                answer = {"value": store.add(keys[0], int(message.words["amount"]))}, []
            case b"cas ":
                answer = {}, [store.compare_set(keys[0], values[0], values[1])]
            case _:
                raise FtError(f"no request of a store: {message.kind!r}")
        for key in keys:
            for request in self._waiting.pop(key, ()):
                self._proceed(request)
        return answer

    def _forget(self, request: _Request) -> None:
        """Remove a request that waits."""
        self._of_peer.pop(request.peer, None)
        key, request.waits_for = request.waits_for or "", None
        self._waiting[key].remove(request)
        if not self._waiting[key]:
            del self._waiting[key]

    def _give_up(self, now: float) -> None:
        """Answer the requests whose time is up."""
        while self._limits and (self._limits[0][2].waits_for is None or self._limits[0][0] <= now):
            request = heapq.heappop(self._limits)[2]
            if request.waits_for is not None:
                self._forget(request)
                self._acceptor.answer(request.peer, LATE)


def lone_tcp_store() -> Any:
    """Return a TCPStore of torch's whose port is closed, so that this process alone can use it.

    torch's TCPStore cannot be made without a port, and serves whoever connects to it. Therefore another file takes the
    place of its listening socket once this process's own client is connected. A store that somebody else has reached in
    between is thrown away.

    Raises:
        FtError: somebody keeps connecting to stores of this process.
    """
    for _ in range(_ATTEMPTS):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            address, descriptor = listener.getsockname(), os.dup(listener.fileno())
            how: dict[str, Any] = {"wait_for_workers": False, "timeout": VERY_LONG, "master_listen_fd": descriptor}
            own = c10d.TCPStore(address[0], address[1], is_master=True, **how)
        with open(os.devnull) as nothing:
            os.dup2(nothing.fileno(), descriptor, inheritable=False)
        accepted = sockets.touching(sockets.held(), {address})  # the client's end has the form ::ffff:127.0.0.1
        if len(accepted) == 1:
            return own
    raise FtError("strangers on this node keep connecting to the store of the control plane while it is made")


_GRACE_S = 10.0
"""How much longer than a request may wait the server has for its answer, in seconds."""
_MARK = Mark()
_OPEN: set["StoreConnection"] = set()
"""Connections in use. torch's process groups hold only the C++ half of a store, which calls the Python half."""


class StoreConnection(c10d.Store):
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

    timeout: timedelta  # of torch's class, whose stub lacks it

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
    ) -> ReceivedMessage:
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
        except HandshakeRefused as error:
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
