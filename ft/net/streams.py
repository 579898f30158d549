"""What a snapshot server listens on and dials: streams of bytes, over TCP or over MPI (:mod:`ft.net.mpi`)."""

import socket
from abc import ABC, abstractmethod

TRANSPORT = "FT_TRANSPORT"
"""Environment of a worker: "mpi", or what means TCP."""


class Network(ABC):
    """Streams between workers; what passes over one is checked by its two ends, not here."""

    @abstractmethod
    def listen(self) -> tuple[socket.socket, str]:
        """A listening socket, and the address that other workers dial to reach it."""

    @abstractmethod
    def dial(self, address: str, patience_s: float) -> socket.socket:
        """A connection to ``address``.

        Raises:
            OSError: there is none within ``patience_s``; TimeoutError when nothing has answered at all.
        """


class TcpNetwork(Network):
    """Addresses are "host:port". ``host``: the one of this node that others reach it at."""

    def __init__(self, host: str):
        self._host = host

    def listen(self) -> tuple[socket.socket, str]:
        listener = socket.create_server((self._host, 0), backlog=64)
        return listener, f"{self._host}:{listener.getsockname()[1]}"

    def dial(self, address: str, patience_s: float) -> socket.socket:
        host, port = address.rsplit(":", 1)
        return socket.create_connection((host, int(port)), timeout=patience_s)
