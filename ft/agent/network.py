"""Addresses and ports of this node."""

import socket
import time

from ft.errors import UserError

_RETRY_S = 0.02


def free_port(host: str = "") -> int:
    """A TCP port that nobody listens at now."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]


def check_port(host: str, port: int) -> None:
    """Whether this node can listen at ``host:port``.

    Raises:
        UserError: something else listens there, or the host is unknown or another machine's.
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
            raise UserError(f"cannot listen at {host}:{port}: {error.strerror}", fix) from error


def wait_for_listener(host: str, port: int, patience_s: float) -> None:
    """Waits until something answers at ``host:port``: a store's client that comes too early waits for seconds.

    Raises:
        ConnectionError: nothing did within ``patience_s``.
    """
    deadline = time.monotonic() + patience_s
    while True:
        try:
            socket.create_connection((host, port), timeout=patience_s).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise ConnectionError(f"no control plane at {host}:{port} within {patience_s:g} s ({error})") from error
            time.sleep(_RETRY_S)


def own_address(host: str, port: int, is_host: bool) -> str:
    """The address that other nodes reach this one at, found by asking which way leads to the control plane.

    Args:
        host, port: of the control plane. is_host: it is on this node.

    Raises:
        UserError: the host is unknown.
    """
    found = _towards(host, port)
    if not found.startswith("127.") or not is_host or host == "localhost" or host.startswith("127."):
        return found
    # The node's own name is often written down as a loopback address in its hosts file: that is of no use to others.
    try:
        return _towards("192.0.2.1", port)
    except UserError:
        return found


def _towards(host: str, port: int) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, port))
        except OSError as error:
            raise UserError(
                f"no way to the host {host} of --rdzv-endpoint ({error})", "check its name and --rdzv-endpoint"
            ) from error
        return probe.getsockname()[0]
