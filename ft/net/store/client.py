"""Client connection of a worker to the run's TCPStore, in which process groups rendezvous.

The store's server (``StoreServer``) listens on two ports: the admission port, on which a client proves that it belongs
to the run, and the port of torch's TCPStore itself, which accepts packets from admitted clients only.
"""

import contextlib
import fcntl
import os
import select
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from ft.base.errors import FtError, UserError
from ft.net.handshake import NotAMember, Party, Refused, dial
from ft.net.store.server import HANDSHAKE_S, PORT, PURPOSE
from ft.platform import sockets

_BUFFER = 1 << 16
_LOOK_S = 0.001
_NAME_SERVER_S = 60.0


class StoreConnection:
    """A client connection to a ``StoreServer``, whose blocking calls can be aborted from outside.

    torch's client opens its own socket and cannot use an existing one. Therefore it connects to a local port of this
    process, and this class forwards torch's handshake between that connection and a socket that the server has
    admitted. Then dup2 replaces the client's file descriptor by the admitted socket, so that the client communicates
    with the store directly. A ``clone`` of the client knows only the local port; a thread forwards its traffic for as
    long as it exists.

    Args:
        address: ``StoreServer.address``, the admission port as host:port.
        token: the run's token.
        timeout_s: timeout of the store's blocking calls and of connecting, in seconds.

    Attributes:
        store: torch's client.
        is_broken: whether ``break_off`` was called.

    Raises:
        ConnectionError: no server answers at ``address``, or it is not the store of a run.
        UserError: the server refuses the token.
    """

    def __init__(self, address: str, token: str, timeout_s: float = 30.0):
        self._address, self._token, self._timeout_s = address, token, timeout_s
        self.is_broken = False
        self._gate = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._gate.bind(("127.0.0.1", 0))
        self._gate.listen()
        self._port = _port(self._gate)
        try:
            self._own = _enter(address, token, timeout_s)
            self.store = self._make_client()
        except BaseException:
            self._gate.close()
            raise
        threading.Thread(target=_serve_clones, args=(self._gate, address, token), name="ft-gate", daemon=True).start()

    def break_off(self) -> None:
        """Close the connection. A call that is blocked in the store, in any thread, fails, and so do later calls."""
        self.is_broken = True
        self.close()

    def close(self) -> None:
        for own in (self._own, self._gate):
            with contextlib.suppress(OSError):
                own.shutdown(socket.SHUT_RDWR)
        self._gate.close()

    def _make_client(self) -> dist.TCPStore:
        made: list[dist.TCPStore | Exception] = []

        def make() -> None:
            try:
                made.append(_client(self._port))
            except Exception as error:
                made.append(error)

        maker = threading.Thread(target=make, name="ft-store", daemon=True)
        maker.start()
        near = _accept_own(self._gate, lambda: not maker.is_alive())
        if near is not None:
            introduction = _Introduction(self._timeout_s)
            # An OSError means that one of the two connections has ended, which the checks below detect.
            with contextlib.suppress(OSError):
                _carry(near, self._own, lambda: not maker.is_alive() or introduction.fails(), introduction.moved)
            if maker.is_alive():  # The store does not answer. Closing the local end also stops the client's retries.
                near.close()
                raise ConnectionError(f"the store at {self._address} does not answer")
        maker.join()
        if isinstance(made[0], Exception):
            raise ConnectionError(f"the store at {self._address} does not answer: {str(made[0]).splitlines()[0]}")
        descriptor = _far_end(near)
        fcntl.fcntl(self._own.fileno(), fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL))
        os.dup2(self._own.fileno(), descriptor, inheritable=False)
        near.close()
        made[0].set_timeout(timedelta(seconds=self._timeout_s))
        return made[0]


class _Introduction:
    """Detects a store that leaves the client's handshake without an answer for ``timeout_s`` seconds."""

    def __init__(self, timeout_s: float):
        self._timeout_s = timeout_s
        self._asked_at: float | None = None

    def moved(self, is_answer: bool) -> None:
        """Note that bytes were forwarded from the client to the store or, with ``is_answer``, back."""
        self._asked_at = None if is_answer else time.monotonic()

    def fails(self) -> bool:
        return self._asked_at is not None and time.monotonic() - self._asked_at > self._timeout_s


def _client(port: int) -> dist.TCPStore:
    """Create torch's client.

    Between connecting and its handshake, the client makes a reverse name lookup, which takes 5 s and more if the name
    server does not answer. The client's timeout must be longer than that.
    """
    limit = timedelta(seconds=_NAME_SERVER_S)
    return dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=limit)


def _enter(address: str, token: str, timeout_s: float) -> socket.socket:
    """Authenticate on the admission port, and return a socket that is connected to the store's own port.

    Args:
        address: admission port of the store as host:port.
        token: the run's token.
        timeout_s: limit in seconds for each step of connecting.

    Raises:
        ConnectionError: no server answers at ``address``, or it is not the store of a run.
        UserError: the server refuses the token.
    """
    try:
        return _pass_door(address, token, timeout_s)
    except ConnectionError:
        raise
    except OSError as error:  # a network failure, such as a timeout or no route, is reported like a host that is down
        raise ConnectionError(f"{address} cannot be reached: {error}") from error


def _pass_door(address: str, token: str, timeout_s: float) -> socket.socket:
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=timeout_s) as door:
        own = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            own.bind((door.getsockname()[0], 0))
            inside = _ask_port(door, address, token, timeout_s, _port(own))
            own.settimeout(timeout_s)
            own.connect((door.getpeername()[0], inside))
            door.sendall(b"\n")  # tells the admission server that this client is connected to the store
        except BaseException:
            own.close()
            raise
    own.settimeout(None)
    own.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return own


def _ask_port(door: socket.socket, address: str, token: str, timeout_s: float, here: int) -> int:
    """Authenticate on the admission port, and return the store's own port.

    From then on, the store accepts packets from this host's port ``here``.

    Raises:
        ConnectionError: the other end is not the store of a run.
        UserError: the other end refuses the token.
    """
    try:
        party = Party(token, PURPOSE, is_dialer=True)
        _, reply = dial(door, party, timeout_s, PORT.pack(here), PORT.size)
        (inside,) = PORT.unpack(reply)
    except NotAMember as error:
        raise ConnectionError(f"{address} is no store of a run: {error}") from error
    except Refused as error:
        raise UserError(
            f"the store at {address} belongs to another run: it refuses this one's token",
            "start each run with a --run-dir and an endpoint of its own",
        ) from error
    return inside


def _accept_own(gate: socket.socket, is_over: Callable[[], bool] | None = None) -> socket.socket | None:
    """Return the next connection to ``gate`` from this process itself; close connections from other processes.

    While no connection arrives, call ``is_over`` repeatedly, and return None as soon as it returns True.
    """
    while True:
        if is_over is not None and not select.select([gate], [], [], _LOOK_S)[0]:
            if is_over():
                return None
            continue
        near, (_, port) = gate.accept()
        if any(_port(own) == port for own in sockets.opened(sockets.towards(sockets.held(), _port(gate)))):
            return near
        near.close()


def _carry(
    near: socket.socket,
    far: socket.socket,
    is_over: Callable[[], bool] | None = None,
    moved: Callable[[bool], None] = lambda is_answer: None,
) -> None:
    """Forward bytes in both directions until one end closes, or until ``is_over`` returns True while no bytes arrive.

    Args:
        near: the connection of torch's client.
        far: the connection to the store.
        is_over: called whenever no bytes have arrived for a millisecond; None: forward until one end closes.
        moved: called after every transfer with False if bytes were sent to ``far``, with True if back to ``near``.
    """
    while True:
        readable = select.select([near, far], [], [], None if is_over is None else _LOOK_S)[0]
        if not readable and is_over():
            return
        for own in readable:
            data = own.recv(_BUFFER)
            if not data:
                return
            (far if own is near else near).sendall(data)
            moved(own is far)


def _serve_clones(gate: socket.socket, address: str, token: str) -> None:
    def serve(near: socket.socket) -> None:
        with contextlib.suppress(OSError, FtError), near, _enter(address, token, HANDSHAKE_S) as far:
            _carry(near, far)

    while True:
        try:
            near = _accept_own(gate)
        except OSError:
            return
        threading.Thread(target=serve, args=(near,), name="ft-gate", daemon=True).start()


def _far_end(near: socket.socket) -> int:
    """Return the file descriptor of the other end of ``near``, a connection whose two ends are in this process.

    Port numbers alone do not identify it: a connection to another host may have the same remote port.
    """
    theirs, ours = near.getpeername()[1], _port(near)
    for descriptor, inode in sockets.towards(sockets.held(), ours).items():
        if any(_port(own) == theirs for own in sockets.opened({descriptor: inode})):
            return descriptor
    raise FtError("torch's client has closed its connection")


def _port(own: socket.socket) -> int:
    return own.getsockname()[1]
