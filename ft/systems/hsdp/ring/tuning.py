"""What the connections of a ring are set to: no delays, and a bound on the bytes that are on their way."""

import contextlib
import socket
from pathlib import Path

from ft.systems.hsdp.ring.options import RingOptions

_SETTINGS = Path("/proc/sys/net")


def tuned(connections: list[socket.socket], options: RingOptions) -> list[socket.socket]:
    """Sets them, the one for control first, and returns them. Other transports than TCP bound it themselves."""
    bound = send_buffer(options.chunk_bytes * options.chunks // options.streams, *_limits())
    for place, connection in enumerate(connections):
        if connection.family == socket.AF_UNIX:
            continue
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if place and bound:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, bound)
    return connections


def send_buffer(in_flight: int, asked_at_most: int, grown_at_most: int) -> int | None:
    """The send buffer to ask for, so that at most ``in_flight`` bytes are sent and not acknowledged; None: do not ask.

    Args:
        asked_at_most: what a process may ask for (of which Linux gives the double, for its own needs).
        grown_at_most: up to where Linux lets a buffer grow that nobody has asked for.

    A buffer that is asked for does not grow: one that would become smaller than the bound for want of permission costs
    bandwidth over long ways, so it is left alone where it cannot outgrow the bound.
    """
    if in_flight // 2 > asked_at_most and grown_at_most <= in_flight:
        return None
    return in_flight // 2


def _limits() -> tuple[int, int]:
    with contextlib.suppress(OSError, ValueError, IndexError):
        grown = int((_SETTINGS / "ipv4/tcp_wmem").read_text().split()[2])
        return int((_SETTINGS / "core/wmem_max").read_text()), grown
    return 0, 1 << 62
