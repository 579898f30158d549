"""Finds free TCP ports and addresses of this node for ``ft run``."""

import contextlib
import random
import socket
from collections import deque
from pathlib import Path

from ft.base.errors import UserError
from ft.platform import ports

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
            held = f" ({holder} listens there)" if (holder := ports.listener(port)) else ""
            raise UserError(f"cannot listen at {host}:{port}: {error.strerror}{held}", fix) from error


def own_address(host: str, port: int, is_host: bool) -> str:
    """Return the address at which other nodes reach this one: that of the interface that leads to the control plane.

    Args:
        host: host of the control plane.
        port: port of the control plane.
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
