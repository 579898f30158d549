"""A proxy that alters the traffic between a client and its server."""

import contextlib
import socket
import threading
from collections.abc import Callable

from ft.net.streams import Network, TcpNetwork

Change = Callable[[bytes, int], bytes | None]


def unchanged(data: bytes, before: int) -> bytes:
    return data


class Proxy:
    """A proxy in front of ``target``.

    Args:
        target: address of the server.
        answers: (bytes on their way to the client, number of bytes before them) -> bytes to send instead; None: send
            nothing more and close the connection.
        asks: the same of bytes on their way to the server.
        network: the network of both.

    Attributes:
        address: address at which the client reaches it.
        connections: number of connections so far.
    """

    def __init__(
        self, target: str, answers: Change = unchanged, asks: Change = unchanged, network: Network | None = None
    ):
        self._target, self._answers, self._asks = target, answers, asks
        self._network = network or TcpNetwork("127.0.0.1")
        self.connections = 0
        self._ends: list[socket.socket] = []
        self._pumps: list[threading.Thread] = []
        self._listener, self.address = self._network.listen()
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._accepting.start()

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self.close()

    def close(self) -> None:
        _shut_down(self._listener)
        self._accepting.join()
        _shut_down(*self._ends)
        for pump in self._pumps:
            pump.join()
        for each in (self._listener, *self._ends):
            each.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                self.connections += 1
                far = self._network.dial(self._target, 10)
                far.settimeout(None)
                self._ends += [near, far]
                for way in ((near, far, self._asks), (far, near, self._answers)):
                    self._pumps.append(threading.Thread(target=self._pump, args=way, daemon=True))
                    self._pumps[-1].start()

    def _pump(self, source: socket.socket, sink: socket.socket, change: Change) -> None:
        passed = 0
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                changed = change(data, passed)
                passed += len(data)
                if changed is None:
                    break
                sink.sendall(changed)
        _shut_down(source, sink)


def _shut_down(*ends: socket.socket) -> None:
    for end in ends:
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
