"""Injector of the faults that an agent carries out: it ends its node, cuts its network, or kills the control plane.

It can cut its network if it runs in a network namespace of its own.
"""

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from ft.base import bounded_json
from ft.base.errors import UserError
from ft.faults.faults import Fault, FaultTimer
from ft.platform import election

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
    """Return whether the namespace differs from that of process 1 or, if that cannot be read, has a name (``ip
    netns``).
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


class AgentInjector(FaultTimer):
    """Carries out the planned faults of one agent.

    Args:
        run_dir: directory of the run, which contains the control plane's lease record.
        announce: called before each fault, as for ``ft.faults.worker.Injector``; possibly from another thread.

    Raises:
        UserError: this process lacks the permissions for a fault that is planned for it.
    """

    def __init__(
        self,
        faults: Sequence[Fault],
        node: str,
        run_dir: str | Path,
        announce: Callable[[Fault], None],
    ):
        super().__init__(agents_faults(faults, node), announce)
        self._run_dir, self._node = Path(run_dir), node
        self._outages: list[Outage] = []
        if any(fault.kind == "partition" for fault in self._mine):
            check_allowed()

    def progressed(self, step: int) -> None:
        """Carry out the faults of the step after ``step``, which a worker has reported as the last committed one."""
        for fault in self._mine:
            if fault.step is not None and fault.step <= step + 1:
                self._fire(fault)

    def close(self) -> None:
        """Stop the thread of the timed faults, and restore a network that was cut."""
        super().close()
        for outage in self._outages:
            outage.end()

    def _fire(self, fault: Fault) -> None:
        if not self._is_first(fault) or (fault.kind == "kill-control" and not controls(self._run_dir, self._node)):
            return
        self._announce(fault)
        if fault.kind == "kill":
            kill_node()
        elif fault.kind == "kill-control":
            kill_control(self._run_dir)
        elif fault.kind == "kill-agent":
            os.kill(os.getpid(), signal.SIGKILL)
        else:
            self._outages.append(Outage(fault.seconds))


def agents_faults(faults: Sequence[Fault], node: str) -> list[Fault]:
    """Return the faults that the agent of ``node`` carries out.

    Every agent gets kill-control, because the control plane may run beside any agent when the fault is due.
    """
    return [f for f in faults if f.is_injected_by_agent and (f.node == node or f.kind == "kill-control")]


def controls(run_dir: Path, node: str) -> bool:
    """Return whether the control plane runs beside the agent of ``node``."""
    standing = election.read(run_dir)
    return standing is not None and standing.node == node


def kill_control(run_dir: Path) -> bool:
    """Kill the control plane, which runs on this host, with SIGKILL; return False if there is none."""
    standing = election.read(run_dir)
    if standing is None or not standing.where:
        return False
    try:
        os.kill(standing.pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def kill_node() -> None:
    """Kill this process and all its descendants, as if their machine had lost power."""
    myself = psutil.Process()
    # All are stopped first, so that none can report the death of another.
    below = myself.children(recursive=True)
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for process in below:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)
    myself.kill()
