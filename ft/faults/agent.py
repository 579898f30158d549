"""Injector of the faults that an agent carries out: it ends its node, cuts its network, or kills the control plane.

An agent is the supervisor process of one node.
"""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import psutil

from ft.faults import network
from ft.faults.alarm import Alarm
from ft.faults.faults import Fault
from ft.platform import election


class AgentInjector:
    """Carries out the planned faults of one agent.

    Args:
        faults: planned faults of the whole run.
        node: node of this agent.
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
        self.mine = agents_faults(faults, node)
        self._run_dir, self._node, self._announce = Path(run_dir), node, announce
        self._lock = threading.Lock()
        self._fired: set[int] = set()
        self._alarm: Alarm | None = None
        self._outages: list[network.Outage] = []
        if any(fault.kind == "partition" for fault in self.mine):
            network.check_allowed()

    def begin(self, began: float | None = None) -> None:
        """Start the timer for faults with a time. ``began``: wall-clock time at which training began; default: now."""
        timed = [fault for fault in self.mine if fault.step is None]
        if timed and self._alarm is None:
            self._alarm = Alarm(timed, time.time() if began is None else began, self._fire)

    def progressed(self, step: int) -> None:
        """Carry out the faults of the step after ``step``, which a worker has reported as the last committed one."""
        for fault in self.mine:
            if fault.step is not None and fault.step <= step + 1:
                self._fire(fault)

    def update(self, fired: Iterable[int]) -> None:
        """Add the numbers of faults that have happened, as an ``Open`` order (which opens an epoch) lists them."""
        with self._lock:
            self._fired |= set(fired)

    def close(self) -> None:
        """Stop the timer, and restore a network that was cut."""
        if self._alarm is not None:
            self._alarm.close()
        for outage in self._outages:
            outage.end()

    def _fire(self, fault: Fault) -> None:
        with self._lock:
            if fault.number in self._fired:
                return
            self._fired.add(fault.number)
        if fault.kind == "kill-control" and not controls(self._run_dir, self._node):
            return
        self._announce(fault)
        if fault.kind == "kill":
            kill_node()
        elif fault.kind == "kill-control":
            kill_control(self._run_dir)
        elif fault.kind == "kill-agent":
            os.kill(os.getpid(), signal.SIGKILL)
        else:
            self._outages.append(network.Outage(fault.seconds))


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
