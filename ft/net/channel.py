"""One JSON line per message over a unix stream socket, for an event loop: nothing here blocks."""

import socket


class Channel:
    """The agent's end of a connection.

    Args:
        sock: connected; it is made non-blocking.

    Attributes:
        gone: the other side has hung up.
    """

    def __init__(self, sock: socket.socket):
        sock.setblocking(False)
        self.sock = sock
        self.gone = False
        self._in = b""
        self._out = b""

    @property
    def wants_write(self) -> bool:
        return bool(self._out)

    def fileno(self) -> int:
        return self.sock.fileno()

    def send(self, line: str) -> None:
        """Queues a line and sends what the other side takes now; the rest goes with ``flush``."""
        self._out += line.encode() + b"\n"
        self.flush()

    def flush(self) -> None:
        """Sends what the other side takes; what it will never take (it is gone) is dropped."""
        try:
            while self._out:
                self._out = self._out[self.sock.send(self._out) :]
        except BlockingIOError:
            pass
        except OSError:
            self._out = b""

    def receive(self) -> list[bytes] | None:
        """The complete lines that have come, None when the other side is gone and all it said was returned."""
        self._read()
        *lines, self._in = self._in.split(b"\n")
        return None if self.gone and not lines else lines

    def receive_line(self) -> bytes | None:
        """The first complete line; those behind it stay for ``receive``. None: not yet, or never (``gone``)."""
        self._read()
        line, newline, rest = self._in.partition(b"\n")
        if not newline:
            return None
        self._in = rest
        return line

    def _read(self) -> None:
        try:
            while data := self.sock.recv(1 << 16):
                self._in += data
            self.gone = True
        except BlockingIOError:
            pass
        except OSError:
            self.gone = True

    def close(self) -> None:
        self.sock.close()
