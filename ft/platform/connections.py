"""How long packets take to other hosts, as the kernel measures it for each TCP connection of this host.

The kernel tells it through its socket for diagnostics (``man 7 sock_diag``), which ``ss -ti`` reads, too. Connections
of all processes are listed, those of gloo between the workers included.
"""

import ipaddress
import socket
import struct
from collections.abc import Iterator

_DIAGNOSTICS, _BY_FAMILY, _DONE, _ERROR = 4, 20, 3, 2
_REQUEST_ALL = 0x301
_ESTABLISHED = 1 << 1
_WITH_INFO, _INFO = 1 << 1, 2
_HEADER, _MESSAGE, _ATTRIBUTE = struct.Struct("=IHHII"), struct.Struct("=4B2H16s16s"), struct.Struct("=HH")
_MESSAGE_BYTES, _RTT_AT = 72, 68
_TIMEOUT_S = 0.5
_BYTES = 1 << 16


def round_trip_s() -> float | None:
    """Return the shortest round trip to another host over the present TCP connections, in seconds.

    The shortest one tells a slow connection of this host, which all of its connections share, from one of another host.
    None if there is no connection to another host, or the kernel does not tell.
    """
    found = []
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            found += [rtt_s for here, there, rtt_s in _connections(family) if here != there and not there.is_loopback]
        except (OSError, struct.error):
            continue
    return min(found, default=None)


def _connections(family: int) -> Iterator[tuple]:
    """Yield (own address, other address, smoothed round trip in seconds) of each established connection."""
    request = struct.pack("=4BI48x", family, socket.IPPROTO_TCP, _WITH_INFO, 0, _ESTABLISHED)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, _DIAGNOSTICS) as kernel:
        kernel.settimeout(_TIMEOUT_S)
        kernel.send(_HEADER.pack(_HEADER.size + len(request), _BY_FAMILY, _REQUEST_ALL, 0, 0) + request)
        while True:
            for kind, body in _split(kernel.recv(_BYTES)):
                if kind in (_DONE, _ERROR):
                    return
                *_, source, target = _MESSAGE.unpack_from(body)
                size = 4 if family == socket.AF_INET else 16
                here, there = (ipaddress.ip_address(one[:size]) for one in (source, target))
                if (info := _attribute(body[_MESSAGE_BYTES:], _INFO)) is not None:
                    yield here, there, struct.unpack_from("=I", info, _RTT_AT)[0] / 1e6


def _split(data: bytes) -> Iterator[tuple[int, bytes]]:
    while len(data) >= _HEADER.size:
        length, kind, *_ = _HEADER.unpack_from(data)
        yield kind, data[_HEADER.size : length]
        data = data[_aligned(length) :]


def _attribute(data: bytes, wanted: int) -> bytes | None:
    while len(data) >= _ATTRIBUTE.size:
        length, kind = _ATTRIBUTE.unpack_from(data)
        if kind == wanted:
            return data[_ATTRIBUTE.size : length]
        data = data[_aligned(max(length, _ATTRIBUTE.size)) :]
    return None


def _aligned(length: int) -> int:
    return -(-length // 4) * 4
