"""Interface for byte streams between workers (training processes), implemented over TCP here and over MPI in ``mpi``.

Framed channels (:mod:`ft.net.framed`) use them to send the training state to other workers.
"""

import socket
from abc import ABC, abstractmethod

TRANSPORT = "FT_TRANSPORT"
"""Environment variable of a worker: "mpi"; all other values mean TCP."""


class Network(ABC):
    """Byte streams between workers. The network does not verify the data; the programs at both ends of a stream do."""

    @abstractmethod
    def listen(self) -> tuple[socket.socket, str]:
        """Return a listening socket, and the address at which other workers reach it."""

    @abstractmethod
    def dial(self, address: str, patience_s: float) -> socket.socket:
        """Return a connection to ``address``.

        Raises:
            OSError: no connection was established within ``patience_s`` seconds.
            TimeoutError: the other side has not answered at all.
        """


class TcpNetwork(Network):
    """The network over TCP. Addresses are "host:port".

    Args:
        host: address at which other nodes reach this node.
    """

    def __init__(self, host: str):
        self._host = host

    def listen(self) -> tuple[socket.socket, str]:
        listener = socket.create_server((self._host, 0), backlog=64)
        return listener, f"{self._host}:{listener.getsockname()[1]}"

    def dial(self, address: str, patience_s: float) -> socket.socket:
        host, port = address.rsplit(":", 1)
        return socket.create_connection((host, int(port)), timeout=patience_s)
