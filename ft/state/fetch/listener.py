"""HTTP server with bounded resources: one interface, a limited number of connections, and a deadline for each request.

The state server (:mod:`ft.state.fetch.server`) listens with it for ranks of other replicas that fetch training state.
A connection that has not authenticated yet must send its request within :data:`HELLO_S` seconds in all, however slowly
its bytes arrive, and is the first to be dropped when there are too many connections.
"""

import contextlib
import io
import socket
import socketserver
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from ft.base.errors import UserError

HELLO_S = 5.0
MAX_CONNECTIONS = 128
_POLL_S = 0.5
_OUT_OF_DESCRIPTORS_S = 0.05
_NOTES_S, _MAX_NOTES = 60.0, 20
_ANYWHERE = ("", "0.0.0.0", "::", "*")


class Deadline(io.RawIOBase):
    """Raw input stream of a socket whose reads fail after a deadline. The deadline can be moved.

    Attributes:
        until: time.monotonic() after which reading raises TimeoutError.
    """

    def __init__(self, connection: socket.socket, until: float):
        self._connection, self.until = connection, until

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        left = self.until - time.monotonic()
        if left <= 0:
            raise TimeoutError("no whole request in time")
        self._connection.settimeout(left)
        return self._connection.recv_into(buffer)


class Listener(ThreadingHTTPServer):
    """Serves connections, each in its own thread, until :meth:`close`.

    Args:
        host: name or IPv4 address of the interface at which others reach this process; the port is any free one.
        make: called as make(connection, address, listener); handles that connection until it ends.

    Attributes:
        where: address of the server, "host:port".

    Raises:
        UserError: ``host`` is not an address of a single interface of this machine.
    """

    daemon_threads = True
    block_on_close = False
    request_queue_size = 64
    allow_reuse_address = False

    def __init__(self, host: str, make: Callable[..., BaseHTTPRequestHandler]):
        if host in _ANYWHERE:
            raise UserError(
                f"the state cannot be served on every interface (host {host!r})",
                "give the address that other replicas reach this node at",
            )
        self._changed = threading.Condition()
        self._connections: dict[socket.socket, bool] = {}  # value: whether it has authenticated
        self._closed = False
        self._noted: deque[float] = deque()
        try:
            super().__init__((host, 0), make)
        except OSError as error:
            raise UserError(
                f"the state cannot be served on {host!r}: {error.strerror or error}",
                "give an address of this node that other replicas reach it at",
            ) from error
        self.where = f"{host}:{self.server_address[1]}"
        self._acceptor = threading.Thread(
            target=self.serve_forever, args=(_POLL_S,), name="ft-fetch-accept", daemon=True
        )
        self._acceptor.start()

    def server_bind(self) -> None:
        # Skip HTTPServer.server_bind: it looks up this host's full name, which may take long.
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]

    def get_request(self):
        try:
            return super().get_request()
        except OSError:
            if not self._closed:
                time.sleep(_OUT_OF_DESCRIPTORS_S)  # descriptors in use will be closed
            raise

    def process_request(self, request, client_address) -> None:
        with self._changed:
            if self._closed or not self._has_room():
                request.close()
                return
            self._connections[request] = False
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # no thread can be started
            self._forget(request)
            raise

    def process_request_thread(self, request, client_address) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._forget(request)

    def welcome(self, connection: socket.socket) -> None:
        """Mark ``connection`` as authenticated."""
        with self._changed:
            if connection in self._connections:
                self._connections[connection] = True

    def handle_error(self, request, client_address) -> None:
        error = sys.exception()
        # OSError and ValueError are ordinary: the peer is gone, too slow, or speaks another protocol
        if not isinstance(error, (OSError, ValueError)):
            self.note(f"a request from {client_address[0]} failed: {error!r}")

    def note(self, what: str) -> None:
        """Print ``what``, at a limited rate, so that unauthenticated peers cannot fill the log."""
        now = time.monotonic()
        with self._changed:
            while self._noted and now - self._noted[0] > _NOTES_S:
                self._noted.popleft()
            if len(self._noted) >= _MAX_NOTES:
                return
            self._noted.append(now)
        print(f"fetch: {what}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """End all connections and threads."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            for connection in self._connections:
                _shut(connection)
        _shut(self.socket)  # wakes the acceptor
        self.shutdown()
        self._acceptor.join()
        self.server_close()
        with self._changed:
            self._changed.wait_for(lambda: not self._connections)

    def _forget(self, connection: socket.socket) -> None:
        with self._changed:
            self._connections.pop(connection, None)
            self._changed.notify_all()

    def _has_room(self) -> bool:
        if len(self._connections) < MAX_CONNECTIONS:
            return True
        stranger = next((connection for connection, known in self._connections.items() if not known), None)
        if stranger is None:
            return False
        del self._connections[stranger]
        _shut(stranger)
        return True


def _shut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it is not connected any more
        connection.shutdown(socket.SHUT_RDWR)
