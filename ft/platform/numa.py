"""Binds a process to the CPUs of the NUMA node of its GPU: copies through the other socket take a slower way.

The kernel tells the node of a PCI device in ``/sys/bus/pci/devices``, and the CPUs of a node in
``/sys/devices/system/node``.
"""

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

BINDING = "FT_NUMA_BINDING"
"""Environment variable: "off" leaves the CPUs of workers as they are."""


def cpus_near(address: str, root: Path = Path("/")) -> set[int]:
    """Return the CPUs of the NUMA node of a PCI device, an empty set if the kernel does not tell.

    Args:
        address: address of the device, such as "0000:3b:00.0".
        root: root of the file tree, normally "/".
    """
    try:
        node = int((root / "sys/bus/pci/devices" / address.lower() / "numa_node").read_text())
        text = (root / f"sys/devices/system/node/node{node}/cpulist").read_text()
    except (OSError, ValueError):
        return set()
    return listed(text) if node >= 0 else set()


def bind(address: str, environment: Mapping[str, str] = os.environ, root: Path = Path("/")) -> set[int]:
    """Bind all threads of this process to the CPUs near a PCI device, as far as it may use them.

    Args:
        root: root of the file tree, normally "/".

    Returns:
        the CPUs; empty if nothing was changed: the process may use none of them or only them, the node is unknown, or
        ``FT_NUMA_BINDING`` is "off".
    """
    allowed = os.sched_getaffinity(0)
    wanted = cpus_near(address, root) & allowed if environment.get(BINDING) != "off" else set()
    if not wanted or wanted == allowed:
        return set()
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # a thread that has ended
            os.sched_setaffinity(int(task), wanted)
    return wanted


def listed(text: str) -> set[int]:
    """Return the numbers of a list of the kernel such as "0-3,8".

    Raises:
        ValueError: it is no such list.
    """
    bounds = [part.strip().partition("-") for part in text.split(",") if part.strip()]
    return {number for first, _, last in bounds for number in range(int(first), int(last or first) + 1)}
