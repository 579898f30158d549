"""Messages between a test and its server: pickles with a length prefix, on a local socket pair."""

import pickle
import socket
import struct

_LENGTH = struct.Struct("!Q")


def send(sock: socket.socket, message: object) -> None:
    """Send one message. Raise OSError if the other side is gone."""
    data = pickle.dumps(message)
    sock.sendall(_LENGTH.pack(len(data)) + data)


def receive(sock: socket.socket) -> object:
    """Return the next message. Raise EOFError if the other side is gone, TimeoutError after the socket's timeout.

    The timeout applies to the start of a message: a message that has begun is read to its end.
    """
    head = sock.recv(1)
    timeout = sock.gettimeout()
    sock.settimeout(None)
    try:
        head += _exactly(sock, _LENGTH.size - len(head)) if head else b""
        if len(head) < _LENGTH.size:
            raise EOFError("the other side is gone")
        return pickle.loads(_exactly(sock, _LENGTH.unpack(head)[0]))
    finally:
        sock.settimeout(timeout)


def _exactly(sock: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = sock.recv(size - len(data))
        if not part:
            raise EOFError("the other side is gone")
        data += part
    return bytes(data)
