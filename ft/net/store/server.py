"""Server of a run's store: a thread that carries out the requests of authenticated clients on one of torch's stores.

A request is a message of :mod:`ft.net.framed`: its kind says what to do, its words name keys, its byte strings are
values. Each request gets one answer. One that waits for keys, or for an entry of a queue, is answered when they are
there, or with ``LATE`` after the seconds that it names. Nobody else writes to torch's store, so that no key appears
unnoticed.
"""

import heapq
import itertools
import os
import socket
import threading
import time
from collections import defaultdict
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from ft.base.errors import FtError, UserError
from ft.net.acceptor import Acceptor, Peer
from ft.net.framed import Message
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

    peer: Peer
    message: Message
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

    def __init__(self, host: str, port: int, token: str, contents: dist.Store | None = None):
        try:
            listener = socket.create_server(("", port), backlog=1024)
        except OSError as error:
            problem = f"port {port} cannot be listened on: {error.strerror}"
            raise UserError(problem, "give --rdzv-endpoint another port") from error
        self.address = f"{host}:{listener.getsockname()[1]}"
        self._contents = contents if contents is not None else dist.HashStore()
        self._acceptor = Acceptor(listener, token, PURPOSE, "store")
        self._waiting: dict[str, list[_Request]] = defaultdict(list)
        self._of_peer: dict[Peer, _Request] = {}
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

    def _take(self, peer: Peer, message: Message) -> None:
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

    def _carry_out(self, message: Message, keys: list[str]) -> tuple[dict[str, int], list[bytes]]:
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
        answer: tuple[dict[str, int], list[bytes]] = {}, []
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
        self._waiting[request.waits_for].remove(request)
        if not self._waiting[request.waits_for]:
            del self._waiting[request.waits_for]
        request.waits_for = None

    def _give_up(self, now: float) -> None:
        """Answer the requests whose time is up."""
        while self._limits and (self._limits[0][2].waits_for is None or self._limits[0][0] <= now):
            request = heapq.heappop(self._limits)[2]
            if request.waits_for is not None:
                self._forget(request)
                self._acceptor.answer(request.peer, LATE)


def lone_tcp_store() -> dist.TCPStore:
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
            own = dist.TCPStore(
                *address, is_master=True, wait_for_workers=False, timeout=VERY_LONG, master_listen_fd=descriptor
            )
        with open(os.devnull) as nothing:
            os.dup2(nothing.fileno(), descriptor, inheritable=False)
        accepted = sockets.touching(sockets.held(), {address})  # the client's end has the form ::ffff:127.0.0.1
        if len(accepted) == 1:
            return own
    raise FtError("strangers on this node keep connecting to the store of the control plane while it is made")
