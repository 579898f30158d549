"""Temporary loss of a node's network, for agents that run in a network namespace of their own."""

import os
import subprocess
import threading
from pathlib import Path

from ft.base import bounded_json
from ft.base.errors import UserError

_NET_ADMIN = 12
_NAMED = Path("/run/netns")
_NEEDS = (
    "run every agent in a network namespace of its own, as root: ip netns add n1; ip netns exec n1 ft run ... "
    "(tests on one machine), or remove the partition fault"
)


def check_allowed() -> None:
    """Check that this process can take its network interfaces down, and that it has a network namespace of its own.

    The machine's own network is never taken down: nothing could end the partition then.

    Raises:
        UserError: the check fails.
    """
    if not _has_own_namespace():
        raise UserError("partition: this agent is not known to have a network namespace of its own", _NEEDS)
    if not _capabilities() >> _NET_ADMIN & 1:
        raise UserError("partition: this user may not change the network (CAP_NET_ADMIN)", _NEEDS)
    if not interfaces():
        raise UserError("partition: this agent's network namespace has no interface that is up", _NEEDS)


def _has_own_namespace() -> bool:
    """Return whether the namespace differs from that of process 1, or, if that one cannot be read, has a name
    (``ip netns``).
    """
    own = os.stat("/proc/self/ns/net").st_ino
    try:
        return own != os.stat("/proc/1/ns/net").st_ino
    except OSError:
        return _NAMED.is_dir() and own in {name.stat().st_ino for name in _NAMED.iterdir()}


def interfaces() -> list[str]:
    """Return the names of the interfaces that are up, without loopback."""
    found = []
    for link in bounded_json.loads(_ip("-j", "link", "show") or "[]"):
        flags = link.get("flags", [])
        if "UP" in flags and "LOOPBACK" not in flags:
            found.append(link["ifname"])
    return found


class Outage:
    """A network outage that begins with the construction of this object and lasts ``seconds`` or until ``end``.

    The routes through a gateway, which the kernel drops with an interface, are restored at the end.
    """

    def __init__(self, seconds: float):
        self._lock = threading.Lock()
        self._interfaces = interfaces()
        self._routes = [route for route in _ip("-4", "route", "show").splitlines() if " via " in route]
        for name in self._interfaces:
            _ip("link", "set", name, "down")
        self._timer = threading.Timer(seconds, self.end)
        self._timer.daemon = True
        self._timer.start()

    def end(self) -> None:
        """Restore the network. A second call does nothing."""
        self._timer.cancel()
        with self._lock:
            names, self._interfaces = self._interfaces, []
            for name in names:
                _ip("link", "set", name, "up")
            for route in self._routes if names else []:
                _ip("route", "replace", *route.replace("linkdown", "").replace("dead", "").split())


def _ip(*arguments: str) -> str:
    try:
        done = subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=10, check=True)
    except FileNotFoundError as error:
        raise UserError("partition: the command ip is not installed", "install iproute2") from error
    except subprocess.CalledProcessError as error:
        raise UserError(f"partition: ip {' '.join(arguments)}: {error.stderr.strip()}", _NEEDS) from error
    return done.stdout


def _capabilities() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            return int(line.split()[1], 16)
    return 0
