"""The devices (GPUs) of a node, as its agent sees them: how many there are, who uses them, and whether they are sound.

A device is looked at before the first worker starts, and whenever a worker that used it has ended: its memory has to be
free again, and no fault may have been recorded, before another worker gets it. The checks happen in threads, because
the driver may take seconds to answer, or hang.

``ft run --suspects FILE`` leaves out devices that computed wrongly in earlier runs. Where devices are not counted (on a
CPU, or where workers share GPUs), nobody knows which device a worker uses, and a node with a suspect is left out as a
whole.
"""

import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ft.base import threads
from ft.base.errors import UserError
from ft.job.messages import DeviceReleased
from ft.platform import devices
from ft.platform.devices import GpuState
from ft.platform.suspects import PULL, read

_FIX = "use another host, or remove the entry from the file if the device has been repaired"


@dataclass(frozen=True)
class LeftOut:
    """What this node must not use.

    Attributes:
        node: why no worker may run here, or "".
        devices: index of a device among all of the node (as a string, for JSON) -> why no worker may use it.
    """

    node: str = ""
    devices: dict[str, str] = field(default_factory=dict)

    def seen(self, count: int, environment: Mapping[str, str]) -> dict[int, str]:
        """Return the devices that no worker may use, as workers number them -> why.

        Args:
            count: number of devices that workers see.
            environment: environment variables of the workers; CUDA_VISIBLE_DEVICES can select devices.
        """
        if not self.devices:
            return {}
        places = {number: str(devices.on_node(number, environment)) for number in range(count)}
        return {number: self.devices[place] for number, place in places.items() if place in self.devices}


def left_out(path: str | Path, workers: int, trains: bool, count: int, environment: Mapping[str, str]) -> LeftOut:
    """Return what this node must not use.

    Args:
        workers: number of training workers of a node.
        trains: whether this node trains from the start.
        count: number of devices of this node that workers see.

    Raises:
        UserError: the file is wrong, or this node is needed for training and has too few other devices.
    """
    path, host = Path(path).absolute(), socket.gethostname()
    here = [one for one in read(path) if one.host in (host, host.split(".")[0]) and one.advice == PULL]
    why = {one.device: f"{path} says that it was {one.why}" for one in here}
    found = LeftOut("", {str(device): reason for device, reason in why.items() if device is not None})
    if None in why:
        found = LeftOut(f"this host, {host}, is not used: {why[None]}")
    elif here and count < workers:
        one = here[0]
        found = LeftOut(f"this host, {host}, is not used, because of its {one.name}: {why[one.device]}")
    if trains and found.node:
        raise UserError(found.node, _FIX)
    seen = found.seen(count, environment)
    if trains and seen and count - len(seen) < workers:
        reasons = "; ".join(f"device {number}: {reason}" for number, reason in seen.items())
        raise UserError(f"this host, {host}, has too few devices left for {workers} worker(s): {reasons}", _FIX)
    return found


FREE_S = 20.0
"""Seconds that the memory of an ended worker's device has to come free; less than ``Timeouts.device_s``."""
_POLL_S = 0.1
_LEAST_SLACK, _SLACK = 1 << 30, 0.02
"""The memory counts as free again if no more than before the first worker is in use, apart from 1 GiB or 2 %."""


class Devices:
    """The devices of one node.

    Args:
        count: function that returns the number of devices.
        workers: number of workers with a logical rank on this node. If there are fewer devices, the workers are meant
            to share them, or to do without, and devices are not counted.
        wake: function that wakes the agent's event loop, called from other threads.
        free_s: seconds that the memory of a device has to come free.

    Attributes:
        count: number of devices; 0 until they are known, and if they are not counted.
        unusable: index of a device -> why no worker can use it.
    """

    def __init__(
        self,
        count: Callable[[], int],
        workers: int,
        wake: Callable[[], None],
        free_s: float = FREE_S,
        environment: Mapping[str, str] = os.environ,
        left_out: LeftOut | None = None,
    ):
        self._count, self._workers, self._wake = count, workers, wake
        self._left_out = left_out or LeftOut()
        self._free_s, self._environment = free_s, environment
        self._before: list[GpuState] = []
        self._of_worker: dict[str, int] = {}
        self._looking: set[str] = set()
        self._reports: deque[DeviceReleased] = deque()
        self._known = threading.Event()
        self.count = 0
        self.unusable: dict[int, str] = {}

    def start(self) -> None:
        """Look at all devices, in another thread; ``is_busy`` until it is done."""
        threading.Thread(target=self._look_first, name="ft-devices", daemon=True).start()

    def described(self) -> dict[str, Any]:
        """Return the fields of ``AgentJoined`` about the devices; wait until the devices are known."""
        self._known.wait()
        return {"devices": self.count, "unusable": dict(self.unusable)}

    @property
    def is_busy(self) -> bool:
        """Return whether the devices are not known yet, or one of them is still used by an ended worker."""
        return not self._known.is_set() or bool(self._looking)

    def sound(self, most: int) -> list[int]:
        """Return the indices of the first usable devices, ``most`` at most."""
        indices = range(self.count or most)
        return [index for index in indices if index not in self.unusable][:most]

    def index_of(self, uuid: str) -> int | None:
        """Return the index of the GPU with this id, or None if workers do not use it or it is not known yet."""
        known = self._before if self._known.is_set() else []
        return next((index for index, reading in enumerate(known) if uuid and reading.uuid == uuid), None)

    def wait(self) -> None:
        """Return when the devices are known."""
        self._known.wait()

    def reject(self, device: int, problem: str) -> None:
        """Give a device to no further worker."""
        self.unusable.setdefault(device, problem)

    def take(self, worker: str, device: int) -> None:
        """Record that a worker uses a device."""
        self._of_worker[worker] = device

    def ended(self, worker: str, node: str) -> None:
        """Look at the device of a worker that has ended, in another thread, until its memory is free."""
        device = self._of_worker.pop(worker, None)
        if device is None or not self.count:
            return
        self._looking.add(worker)
        arguments = (worker, node, device)
        try:
            threads.start(self._look_until_free, arguments, "ft-devices")
        except OSError:  # one check in this thread has to do
            self._reports.append(DeviceReleased(worker, node, device, self._look(device)[0]))
            self._wake()

    def reports(self) -> list[DeviceReleased]:
        """Return the results of the checks that have ended since the last call."""
        done = [self._reports.popleft() for _ in range(len(self._reports))]
        for report in done:
            self._looking.discard(report.worker)
            if report.problem:
                self.unusable[report.device] = report.problem
        return done

    def _look_first(self) -> None:
        try:
            count = self._count()
            self.count = count if count >= self._workers else 0
            if self._left_out.node and not self.count:
                # a device that nobody can use keeps workers away, where a node without devices takes any number of them
                self.count, self.unusable = 1, {0: self._left_out.node}
                return
            self._before = devices.read(self._environment)[: self.count]
            problems = {index: reading.problem for index, reading in enumerate(self._before) if reading.problem}
            self.unusable = {**self._suspects(), **problems}
        finally:
            self._known.set()
            self._wake()

    def _suspects(self) -> dict[int, str]:
        if self._left_out.node:
            return dict.fromkeys(range(self.count), self._left_out.node)
        return self._left_out.seen(self.count, self._environment)

    def _look_until_free(self, worker: str, node: str, device: int) -> None:
        deadline = time.monotonic() + self._free_s
        while True:
            problem, is_free = self._look(device)
            if problem or is_free or time.monotonic() > deadline:
                break
            time.sleep(_POLL_S)
        if not problem and not is_free:
            problem = f"its memory was not free {self._free_s:g} s after its worker {worker} had ended"
        self._reports.append(DeviceReleased(worker, node, device, problem))
        self._wake()

    def _look(self, device: int) -> tuple[str, bool]:
        """Return (fault of the device or "", whether its memory is free). Without NVML, every device is sound."""
        now = devices.read(self._environment) if self._before else []
        if device >= len(self._before):
            return "", True
        if device >= len(now):
            return "the driver does not list it any more", False
        return now[device].problem, is_free(now[device], self._before[device])


def is_free(reading: GpuState, before: GpuState) -> bool:
    """Return whether a worker's memory on a device is free again: whether little more is in use than before it."""
    return reading.used <= before.used + max(_LEAST_SLACK, int(_SLACK * reading.total))
