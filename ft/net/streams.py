"""The networks that a snapshot server uses: byte streams over TCP or over MPI (:mod:`ft.net.mpi`)."""

import socket
from abc import ABC, abstractmethod

TRANSPORT = "FT_TRANSPORT"
"""Environment variable of a worker: "mpi"; all other values mean TCP."""


class Network(ABC):
    """Byte streams between workers. The two ends of a stream check the data, not the network."""

    @abstractmethod
    def listen(self) -> tuple[socket.socket, str]:
        """Return a listening socket, and the address at which other workers reach it."""

    @abstractmethod
    def dial(self, address: str, patience_s: float) -> socket.socket:
        """Return a connection to ``address``.

        Raises:
            OSError: there is none within ``patience_s`` seconds.
            TimeoutError: nothing has answered at all.
        """


class TcpNetwork(Network):
    """The network over TCP. Addresses are "host:port". ``host``: the address at which other nodes reach this node."""

    def __init__(self, host: str):
        self._host = host

    def listen(self) -> tuple[socket.socket, str]:
        listener = socket.create_server((self._host, 0), backlog=64)
        return listener, f"{self._host}:{listener.getsockname()[1]}"

    def dial(self, address: str, patience_s: float) -> socket.socket:
        host, port = address.rsplit(":", 1)
        return socket.create_connection((host, int(port)), timeout=patience_s)
