"""Finds free TCP ports and addresses of this node, who listens on a port, and how long packets take to other hosts.

The kernel measures round trips for each TCP connection of this host, and tells them through its socket for diagnostics
(``man 7 sock_diag``), which ``ss -ti`` reads, too. Connections of all processes are listed, those of gloo between the
workers included.
"""

import contextlib
import ipaddress
import random
import socket
import struct
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil

from ft.base.errors import UserError

_SHOWN = 100


def listener(port: int) -> str:
    """Return the process that listens on a TCP port, such as "process 4711 (python -m http.server)"; "" if none does.

    A process of another user is not visible to a plain user.
    """
    listening = [one for one in psutil.net_connections("tcp") if one.status == psutil.CONN_LISTEN]
    pids = [one.pid for one in listening if one.laddr.port == port]
    if not pids:
        return ""
    with contextlib.suppress(psutil.Error):
        if pids[0] is not None:
            return f"process {pids[0]} ({' '.join(psutil.Process(pids[0]).cmdline())[:_SHOWN]})"
    return "a process of another user"


def interfaces() -> dict[str, str]:
    """Return the first IPv4 address of each network interface of this machine that has one, by the interface's name."""
    found = {}
    for name, addresses in psutil.net_if_addrs().items():
        own = [one.address for one in addresses if one.family == socket.AF_INET]
        found.update({name: own[0]} if own else {})
    return found


def rate_gbps(name: str, root: Path = Path("/")) -> float | None:
    """Return the rate of a network interface in Gb/s, None if the kernel does not tell (virtual interfaces)."""
    try:
        megabits = int((root / "sys/class/net" / name / "speed").read_text())
    except (OSError, ValueError):
        return None
    return megabits / 1000 if megabits > 0 else None


def said_rate(name: str, root: Path = Path("/")) -> str:
    """Return an interface with its rate for people, such as "ib0 (200 Gb/s)"."""
    rate = rate_gbps(name, root)
    return f"{name} ({'rate unknown' if rate is None else f'{rate:g} Gb/s'})"


def of_nccl(given: str, own: Mapping[str, str], root: Path = Path("/")) -> str:
    """Return the fastest interface that NCCL_SOCKET_IFNAME names, "" if it names none that has an address.

    Args:
        given: the value of NCCL_SOCKET_IFNAME: beginnings of names, or with "=" before them whole names. With "^",
            names to leave out, it chooses none.
        own: name of an interface -> its address.
        root: root of the file tree, normally "/".
    """
    if given.startswith("^"):
        return ""
    names = [name for name in given.removeprefix("=").split(",") if name]
    fits = [one for one in own if any(one == name if given.startswith("=") else one.startswith(name) for name in names)]
    return max(fits, key=lambda name: rate_gbps(name, root) or 0.0, default="")


def bulk_interface(environment: Mapping[str, str]) -> tuple[str, str | None]:
    """Return the (name, address) of the interface that bulk data take if no flag names one: the fastest of NCCL's.

    ("", None) if NCCL_SOCKET_IFNAME names none: bulk data then take that of the control messages.
    """
    own = interfaces()
    name = of_nccl(environment.get("NCCL_SOCKET_IFNAME", ""), own)
    return name, own.get(name)


def faster(control: str, own: Mapping[str, str], root: Path = Path("/")) -> list[str]:
    """Return the interfaces that are at least twice as fast as the one with the address ``control``, fastest first."""
    rates = {name: rate for name in own if (rate := rate_gbps(name, root)) is not None}
    present = next((rates[name] for name, address in own.items() if address == control and name in rates), None)
    if present is None:
        return []
    found = [name for name, rate in rates.items() if rate >= 2 * present]
    return sorted(found, key=lambda name: -rates[name])


def cannot_connect(host: str, port: int, limit_s: float) -> str:
    """Return why a TCP connection to ``host:port`` cannot be made within ``limit_s`` seconds, "" if it can.

    Nothing is sent.
    """
    try:
        with socket.create_connection((host, port), timeout=limit_s):
            return ""
    except TimeoutError:
        return f"no answer within {limit_s:g} s"
    except OSError as error:
        return error.strerror or str(error)


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
            for kind, body in _messages_of(kernel.recv(_BYTES)):
                if kind in (_DONE, _ERROR):
                    return
                *_, source, target = _MESSAGE.unpack_from(body)
                size = 4 if family == socket.AF_INET else 16
                here, there = (ipaddress.ip_address(one[:size]) for one in (source, target))
                if (info := _attribute(body[_MESSAGE_BYTES:], _INFO)) is not None:
                    yield here, there, struct.unpack_from("=I", info, _RTT_AT)[0] / 1e6


def _messages_of(data: bytes) -> Iterator[tuple[int, bytes]]:
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


_TRIES, _PORTS, _EPHEMERAL, _RESERVED_AT_ONCE = 20, 8000, 32768, 16

_reserved: deque[socket.socket] = deque()


def free_port(host: str = "") -> int:
    """Return a free TCP port on ``host`` ("": all interfaces), outside the range of ephemeral ports if possible.

    Whoever is to listen there may need seconds to start. So the port is reserved until this process ends or has asked
    for ``_RESERVED_AT_ONCE`` further ones: other calls, also of other processes, return other ports.
    """
    for port in (*random.SystemRandom().sample(_below_the_ephemeral(), _TRIES), 0):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((host, port))
            found = probe.getsockname()[1]
            _reserve(found)
            return found
    raise UserError(f"no free port on {host or 'this node'}", "end a process that holds a port")


def _reserve(port: int) -> None:
    """Bind a Unix socket whose abstract name stands for the port. Like ports, such names belong to the network
    namespace, and the kernel releases them when their process ends.

    Raises:
        OSError: another process has reserved the port.
    """
    mark = socket.socket(socket.AF_UNIX)
    try:
        mark.bind(f"\0megatron-ft.port.{port}")
    except OSError:
        mark.close()
        raise
    _reserved.append(mark)
    if len(_reserved) > _RESERVED_AT_ONCE:
        _reserved.popleft().close()


def _below_the_ephemeral() -> range:
    try:
        first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except OSError:
        first = _EPHEMERAL
    return range(max(1024, first - _PORTS), max(1024 + _PORTS, first))


def check_port(host: str, port: int) -> None:
    """Check that this node can listen on ``host:port``.

    Raises:
        UserError: the port is taken, the host is unknown, or its address belongs to another machine.
    """
    fix = "the host of --rdzv-endpoint must be that of node 0, and its port free"
    try:
        address = socket.gethostbyname(host)
    except OSError as error:
        raise UserError(f"the host {host} of --rdzv-endpoint is unknown ({error})", fix) from error
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError as error:
            held = f" ({holder} listens there)" if (holder := listener(port)) else ""
            raise UserError(f"cannot listen at {host}:{port}: {error.strerror}{held}", fix) from error


def own_address(host: str, port: int, is_host: bool) -> str:
    """Return the address at which other nodes reach this one: that of the interface that leads to the control plane.

    Args:
        is_host: whether the control plane is on this node.

    Raises:
        UserError: the host is unknown.
    """
    found = _towards(host, port)
    if not found.startswith("127.") or not is_host or host == "localhost" or host.startswith("127."):
        return found
    # A hosts file often maps the node's own name to a loopback address, which other nodes cannot use.
    try:
        # The address is reserved for documentation (RFC 5737), so it is reached through the default route.
        return _towards("192.0.2.1", port)
    except UserError:
        return found


def _towards(host: str, port: int) -> str:
    """Return this node's address on the interface that leads to ``host``. Connecting a UDP socket sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, port))
        except OSError as error:
            raise UserError(
                f"no way to the host {host} of --rdzv-endpoint ({error})", "check its name and --rdzv-endpoint"
            ) from error
        return probe.getsockname()[0]
