"""Socket options of the connections of FT-HSDP's all-reduce ring: no delay, and a bound on the bytes in flight."""

import contextlib
import socket
from pathlib import Path

from ft.systems.hsdp.ring.options import RingOptions

_SETTINGS = Path("/proc/sys/net")


def tuned(connections: list[socket.socket], options: RingOptions) -> list[socket.socket]:
    """Set the socket options of the connections to one neighbour, and return the connections.

    The first connection, for control messages, gets no bound. Only TCP connections are tuned; other transports bound
    the bytes in flight themselves.
    """
    bound = send_buffer(options.chunk_bytes * options.chunks // options.streams, *_limits())
    for place, connection in enumerate(connections):
        if connection.family == socket.AF_UNIX:
            continue
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if place and bound:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, bound)
    return connections


def send_buffer(in_flight: int, asked_at_most: int, grown_at_most: int) -> int | None:
    """Return the send buffer to request so that at most ``in_flight`` bytes are unacknowledged; None: request none.

    A buffer of requested size does not grow any more. If the process may not request as much as the bound allows, the
    smaller buffer would cost bandwidth over long distances. So no buffer is requested if the process may not, and
    automatic growth cannot exceed the bound anyway.

    Args:
        in_flight: bound on the unacknowledged bytes.
        asked_at_most: bytes that a process may request (Linux reserves twice as much, for its own needs).
        grown_at_most: bytes up to which Linux lets a buffer grow that was not requested.
    """
    if in_flight // 2 > asked_at_most and grown_at_most <= in_flight:
        return None
    return in_flight // 2


def _limits() -> tuple[int, int]:
    with contextlib.suppress(OSError, ValueError, IndexError):
        grown = int((_SETTINGS / "ipv4/tcp_wmem").read_text().split()[2])
        return int((_SETTINGS / "core/wmem_max").read_text()), grown
    return 0, 1 << 62
