"""Takes readings of a node: asks every source once, and collects what they observe and which of them cannot be read."""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ft.platform.health import clock, disks, memory, nics, pcie, processors
from ft.platform.health.files import Source
from ft.platform.health.gpus import FROM_NVML, Gpus, find_nvml
from ft.platform.health.kernel_log import KernelLog
from ft.platform.health.observation import EVENT, Observation, Reading


class Reader:
    """Takes readings of one node. Used by one thread, which may wait long for a driver that hangs.

    Args:
        node: name of the node.
        root: root of the file tree that is read, normally "/".
        nvml: the module ``pynvml``, or None to ask no GPU.
        watched: folders whose disks are observed.
        clock_status: function that returns what ``clock.kernel_status`` does.

    Attributes:
        asking: name of the source that is being read, "" between readings; any thread may look at it.
    """

    def __init__(
        self,
        node: str,
        root: Path = Path("/"),
        nvml: Any = None,
        watched: Sequence[Path] = (),
        clock_status: Callable[[], tuple[int, int] | None] = clock.kernel_status,
    ):
        self._node, self._root, self._watched, self._clock_status = node, root, tuple(watched), clock_status
        self._gpus = Gpus(nvml, root)
        self._log = KernelLog(root / "dev/kmsg")
        self._aliases: dict[str, str] = {}
        self.asking = ""

    def read(self) -> Reading:
        """Return what the node says of itself now. Events are those since the last reading."""
        node, root, when = self._node, self._root, time.time()
        ahead = clock.ahead_of_monotonic()
        aliases: dict[str, str] = {}
        sources: dict[str, Callable[[], Source]] = {
            "GPUs": lambda: self._gpus.read(node, when),
            "network ports": lambda: nics.read(root, node, when),
            "memory": lambda: memory.read(root, node, when),
            "disks": lambda: disks.read(root, node, when, self._watched),
            "clock": lambda: clock.read(root, node, when, self._clock_status, ahead),
            "processors": lambda: processors.read(root, node, when),
            # last, because they name devices as the other sources do
            "PCIe": lambda: pcie.read(root, node, when, aliases),
            "kernel log": lambda: self._log.read(node, when, ahead, aliases),
        }
        reading = self._collect(when, sources, aliases)
        self._aliases = aliases
        return reading

    def news(self) -> Reading:
        """Return only the events since the last reading or the last call; a reading has to come first.

        This takes so little time that it can be done every second.
        """
        node, when, aliases = self._node, time.time(), dict(self._aliases)
        ahead = clock.ahead_of_monotonic()
        sources: dict[str, Callable[[], Source]] = {
            "GPUs": lambda: self._gpus.news(node, when),
            "kernel log": lambda: self._log.read(node, when, ahead, aliases),
        }
        return self._collect(when, sources, aliases)

    def _collect(self, when: float, sources: Mapping[str, Callable[[], Source]], aliases: dict[str, str]) -> Reading:
        observations: list[Observation] = []
        unreadable: dict[str, str] = {}
        for name, ask in sources.items():
            self.asking = name
            try:
                found = ask()
            except Exception as error:  # what one source answers unexpectedly must not hide the others
                found = Source(self._node, when, unreadable=f"{type(error).__name__}: {error}")
            observations += found.observations
            aliases.update(found.aliases)
            if found.unreadable:
                unreadable[name] = found.unreadable
        self.asking = ""
        return Reading(self._node, when, tuple(_once(observations)), unreadable, aliases)

    def close(self) -> None:
        """Release the driver and the log."""
        self._gpus.close()
        self._log.close()


def of_this_node(node: str, root: Path | None = None, watched: Sequence[Path] = ()) -> Reader:
    """Return a reader of the node that this process runs on.

    Args:
        node: name of the node.
        root: root of another file tree to read instead, in which case no GPU and no clock is asked; None: this node's
            own.
        watched: folders whose disks are observed.
    """
    if root is None:
        return Reader(node, nvml=find_nvml(), watched=watched)
    return Reader(node, root, None, watched, lambda: None)


def _once(observations: Sequence[Observation]) -> list[Observation]:
    """Return observations without the Xids of NVML that the kernel log reports, too, and in more words."""
    logged = {_xid(each) for each in observations if each.kind == EVENT and not each.text.startswith(FROM_NVML)}
    return [o for o in observations if not (o.text.startswith(FROM_NVML) and _xid(o) in logged)]


def _xid(event: Observation) -> tuple[str, str]:
    """Return the device and the name of an event without what the name says besides the number of the Xid."""
    return event.device, ".".join(event.name.split(".")[:2])
