"""The admission protocol of the store: challenge, response, the store's port. The token itself is never sent."""

import hashlib
import hmac
import secrets
import socket

GREETING = "ft-store-1"
REFUSED = "refused"
PATIENCE_S = 5.0
_LONGEST = 200


def challenge() -> str:
    return secrets.token_hex(16)


def answer(token: str, nonce: str, port: int) -> str:
    """Return the response of a client that knows the token and will connect from ``port``."""
    return hmac.new(token.encode(), f"{GREETING} {nonce} {port}".encode(), hashlib.sha256).hexdigest()


def is_right(token: str, nonce: str, port: int, given: str) -> bool:
    return hmac.compare_digest(answer(token, nonce, port).encode(), given.encode())


def say(sock: socket.socket, *words: str | int) -> None:
    sock.sendall((" ".join(str(word) for word in words) + "\n").encode())


def hear(sock: socket.socket) -> list[str]:
    """Return the words of the next line.

    Raises:
        ConnectionError: the peer has closed the connection, or speaks another protocol.
    """
    line = b""
    while not line.endswith(b"\n"):
        byte = sock.recv(1)
        if not byte or len(line) > _LONGEST:
            raise ConnectionError("the other side is no member of this run")
        line += byte
    return line.decode("ascii", "replace").split()
