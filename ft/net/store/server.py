"""Server of the run's TCPStore, in which process groups rendezvous, with access control by an admission port.

A client proves on the admission port that it knows the run's secret token, and announces the local port from which it
will connect to the store. A packet filter on the store's own port accepts packets from announced clients only.
"""

import contextlib
import secrets
import socket
import struct
import threading
from datetime import timedelta

import torch.distributed as dist

from ft.base.errors import UserError
from ft.net.handshake import Party, Refused, accept
from ft.net.store import packets

PURPOSE = "ft-store-2"
PORT = struct.Struct("!H")
"""Encoding of both messages of the handshake: the client's local port, and in return the port of the store."""
HANDSHAKE_S = 5.0
"""Limit for the handshake of one client, in seconds."""

_VERY_LONG = timedelta(days=20)
"""The longest timeout that TCPStore can represent: milliseconds in 31 bits."""
_BACKLOG = 1024


class StoreServer:
    """Hosts a TCPStore in this process, for members of the run only.

    Args:
        host: name or IPv4 address at which clients reach this node.
        port: the admission port; 0: any free one.
        token: the run's token.

    Attributes:
        address: "host:port" of the admission port, for ``StoreConnection``.
        store: client connection of this process itself to the store.

    Raises:
        UserError: the port is taken, or the kernel cannot filter packets.
    """

    def __init__(self, host: str, port: int, token: str):
        self._token = token
        self._store_listener = _listen("", 0)
        self._store_port = self._store_listener.getsockname()[1]
        self._admitted_clients: list[packets.Caller] = []
        self._lock = threading.Lock()
        packets.admit(self._store_listener, [("127.0.0.1", 0)])
        self.store = dist.TCPStore(
            "127.0.0.1",
            self._store_port,
            is_master=True,
            wait_for_workers=False,
            timeout=_VERY_LONG,
            master_listen_fd=self._store_listener.dup().detach(),
        )
        packets.admit(self._store_listener, [])
        self._admission_listener = _listen("", port)
        self.address = f"{host}:{self._admission_listener.getsockname()[1]}"
        threading.Thread(target=self._accept_clients, name="ft-admission", daemon=True).start()

    def close(self) -> None:
        """Stop admitting clients. Connected clients stay connected."""
        with contextlib.suppress(OSError):
            self._admission_listener.shutdown(socket.SHUT_RDWR)
        self._admission_listener.close()

    def _accept_clients(self) -> None:
        while True:
            try:
                client, (address, _) = self._admission_listener.accept()
            except OSError:
                if self._admission_listener.fileno() < 0:
                    return
                continue
            threading.Thread(
                target=self._admit_client, args=(client, address), name="ft-admission", daemon=True
            ).start()

    def _admit_client(self, client: socket.socket, address: str) -> None:
        party = Party(self._token, PURPOSE, is_dialer=False)
        with client, contextlib.suppress(OSError, Refused):
            client.settimeout(HANDSHAKE_S)
            theirs, message = accept(client, party, HANDSHAKE_S, PORT.size, PORT.size)
            (port,) = PORT.unpack(message)
            with self._admitted((address, port)):
                client.sendall(party.seal(theirs, PORT.pack(self._store_port)))
                client.recv(1)  # the client sends a byte once it is connected to the store

    @contextlib.contextmanager
    def _admitted(self, caller: packets.Caller):
        with self._lock:
            self._admitted_clients.append(caller)
            packets.admit(self._store_listener, self._admitted_clients)
        try:
            yield
        finally:
            with self._lock:
                self._admitted_clients.remove(caller)
                packets.admit(self._store_listener, self._admitted_clients)


def warm_up() -> None:
    """Make the next store of this process start without delay.

    With a process's first store, torch makes a reverse name lookup, which takes 10 s if the name server does not
    answer, as in a network that has just failed.
    """
    StoreServer("127.0.0.1", 0, secrets.token_hex(16)).close()


def _listen(host: str, port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise UserError(
            f"port {port} cannot be listened on: {error.strerror}", "give --rdzv-endpoint another port"
        ) from error
    return listener
