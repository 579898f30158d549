"""A non-blocking channel for an event loop: one line of text per message over a stream socket.

The node agent of ``ft run`` uses it for its connections to workers and to the pool that workers are forked from.
"""

import socket

_LONGEST, _FIRST_LINE = 256 << 20, 1 << 16
"""The longest line, and the longest first line, in bytes."""
_AT_ONCE = 4 << 20
"""Bytes that are read before other connections get their turn."""


class Channel:
    """The agent's end of a connection.

    Args:
        sock: a connected socket; it is made non-blocking.

    Attributes:
        gone: whether the peer has closed the connection, or has sent a line that is too long.
    """

    def __init__(self, sock: socket.socket):
        sock.setblocking(False)
        self.sock = sock
        self.gone = False
        self._in = b""
        self._out = b""

    @property
    def wants_write(self) -> bool:
        """Return whether bytes wait until the peer accepts them."""
        return bool(self._out)

    def fileno(self) -> int:
        return self.sock.fileno()

    def send(self, line: str) -> None:
        """Queue a line, and send what the peer accepts now. The rest is sent by ``flush``."""
        self._out += line.encode() + b"\n"
        self.flush()

    def flush(self) -> None:
        """Send what the peer accepts now. If the peer is gone, drop the rest."""
        try:
            while self._out:
                self._out = self._out[self.sock.send(self._out) :]
        except BlockingIOError:
            pass
        except OSError:
            self._out = b""

    def receive(self) -> list[bytes] | None:
        """Return the complete lines that have come; None if the peer is gone and all lines were returned."""
        self._read()
        *lines, self._in = self._in.split(b"\n")
        return None if self.gone and not lines else lines

    def receive_line(self) -> bytes | None:
        """Return the first complete line, and leave later lines to ``receive``.

        None: no complete line has been received yet or, if ``gone`` is set, none will be.
        """
        self._read()
        line, newline, rest = self._in.partition(b"\n")
        if not newline:
            if len(line) > _FIRST_LINE:
                self.gone, self._in = True, b""
            return None
        self._in = rest
        return line

    def _read(self) -> None:
        got, end = bytearray(), False
        try:
            while len(got) < _AT_ONCE and not (end := not (data := self.sock.recv(1 << 16))):
                got += data
        except BlockingIOError:
            pass
        except OSError:
            end = True
        self._in += got
        if len(self._in) - self._in.rfind(b"\n") > _LONGEST:
            self._in, end = b"", True
        self.gone |= end

    def close(self) -> None:
        """Close the socket; what was not sent is lost."""
        self.sock.close()
