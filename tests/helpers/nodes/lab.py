"""The laboratory: simulated hosts, faults of the hosts and of the network between them, and a cleanup without trace."""

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil

from nodes import kernel
from nodes.router import INTERFACE, NETWORK

_FOLDER = Path(__file__).parent.parent
_ROOT = _FOLDER.parent.parent
_POLL_S = 0.005


@functools.cache
def why_not() -> str:
    """Return why hosts cannot be made here, "" if they can."""
    try:
        with Lab(1):
            return ""
    except (OSError, RuntimeError) as error:
        return f"network namespaces with a tun device cannot be made here: {error}"


class Host:
    """One simulated host, with its own address, its own hostname, and its own processes.

    Attributes:
        address: IPv4 address, reachable only from the other hosts of its lab.
        namespace: descriptor of its network namespace.
    """

    def __init__(self, lab: "Lab", index: int, namespace: int):
        self._lab, self.namespace = lab, namespace
        self.index, self.name, self.address = index, f"host{index}", f"{NETWORK}.{index + 1}"
        self._inode = os.fstat(namespace).st_ino

    def start(self, command: list[str], **how: Any) -> subprocess.Popen:
        """Start a process as ``Popen`` does; it is killed when the thread that has called this ends."""
        enter = [sys.executable, "-S", kernel.__file__, str(self.namespace), self.name, str(os.getpid())]
        return subprocess.Popen([*enter, *command], pass_fds=[self.namespace], **how)

    def run(self, *command: str, timeout_s: float = 20.0) -> str:
        """Run a command in this checkout and return its output; raise CalledProcessError if it fails."""
        done = self.start(list(command), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=_ROOT)
        out, _ = done.communicate(timeout=timeout_s)
        if done.returncode:
            raise subprocess.CalledProcessError(done.returncode, command, out)
        return out

    def processes(self) -> list[psutil.Process]:
        """Return all processes on this host, whoever started them."""
        found = []
        for pid in psutil.pids():
            with contextlib.suppress(OSError, psutil.Error):
                if os.stat(f"/proc/{pid}/ns/net").st_ino == self._inode:
                    found.append(psutil.Process(pid))
        return found

    def kill_all(self) -> None:
        """Kill every process at once. The kernel still closes their connections, if the network lets packets out."""
        while self._signal(signal.SIGSTOP):  # first stop all, so that no process reports the death of another
            self._signal(signal.SIGKILL)
            time.sleep(_POLL_S)

    def lose_power(self) -> None:
        """Cut the host off and kill its processes: the other hosts see none of its connections close."""
        self.cut()
        self.kill_all()

    def pause(self) -> None:
        """Stop all processes, as when a virtual machine is migrated; ``go_on`` resumes them."""
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> bool:
        """Send a signal to all processes; return whether there were any."""
        living = [process for process in self.processes() if _lives(process)]
        for process in living:
            with contextlib.suppress(psutil.Error):
                process.send_signal(number)
        return bool(living)

    # --- its network connection --------------------------------------------------------------------------------------

    def cut(self, out: bool = True, into: bool = True) -> None:
        """Drop all packets that leave the host (``out``) or reach it (``into``); neither side is notified."""
        self._impair(out, into, blocked=True)

    def repair(self) -> None:
        """Remove all impairments: no packet is blocked, lost, delayed or throttled."""
        self._impair(True, True, blocked=False, loss=0.0, delay_s=0.0, rate=0.0)

    def degrade(self, *, loss: float = 0.0, delay_s: float = 0.0, rate: float = 0.0) -> None:
        """Set for both directions: the share of packets lost, seconds of delay, bytes per second (0: no limit)."""
        self._impair(True, True, loss=loss, delay_s=delay_s, rate=rate)

    def interface(self, up: bool) -> None:
        """Take the host's own network interface down or up, which the host's kernel notices."""
        self.run("ip", "link", "set", INTERFACE, "up" if up else "down")

    def _impair(self, out: bool, into: bool, **settings: Any) -> None:
        if out:
            self._lab.impair([self], self._lab.hosts, **settings)
        if into:
            self._lab.impair(self._lab.hosts, [self], **settings)


class Lab:
    """``count`` hosts that can reach each other. Use it as a context manager.

    Args:
        count: number of hosts.
        mtu: size of the largest packet, in bytes.
        seed: random seed of the packet loss.

    Raises:
        RuntimeError: hosts cannot be made on this machine or by this user; the message says what is missing.
    """

    def __init__(self, count: int, *, mtu: int = 9000, seed: int = 0):
        self._router = subprocess.Popen(
            [sys.executable, "-m", "nodes.router", str(count), str(mtu), str(seed)],
            cwd=_FOLDER,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        first = self._router.stdout.readline()
        if not first:
            raise RuntimeError(self._router.communicate()[1].strip().splitlines()[-1])
        paths = [f"/proc/{self._router.pid}/fd/{descriptor}" for descriptor in json.loads(first)]
        self._namespaces = [os.open(path, os.O_RDONLY) for path in paths]
        self.hosts = [Host(self, index, namespace) for index, namespace in enumerate(self._namespaces)]

    def impair(self, sources: Iterable[Host], targets: Iterable[Host], **settings: Any) -> None:
        """Change the ``nodes.router.Way`` from each source to each target; in force when this returns."""
        order = {"from": [h.index for h in sources], "to": [h.index for h in targets], "set": settings}
        self._router.stdin.write(json.dumps(order) + "\n")
        self._router.stdin.flush()
        if not self._router.stdout.readline():
            raise RuntimeError(f"the router has ended: {self._router.stderr.read()}")

    def part(self, one_side: Iterable[Host], both_ways: bool = True) -> None:
        """Cut these hosts off from all others; if not ``both_ways``, they can still send, but receive nothing."""
        inside = list(one_side)
        outside = [host for host in self.hosts if host not in inside]
        self.impair(outside, inside, blocked=True)
        if both_ways:
            self.impair(inside, outside, blocked=True)

    def close(self) -> None:
        """End all processes on the hosts, and remove the hosts."""
        for host in self.hosts:
            host.kill_all()
        self._router.stdin.close()
        self._router.wait(60)
        for stream in (self._router.stdout, self._router.stderr):
            stream.close()
        for namespace in self._namespaces:
            os.close(namespace)
        self._namespaces, self.hosts = [], []

    def __enter__(self) -> "Lab":
        return self

    def __exit__(self, *exception) -> None:
        self.close()


def _lives(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    return False
