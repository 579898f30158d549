"""Which devices of this node ``ft run --suspects FILE`` leaves out, because they computed wrongly in earlier runs.

Where devices are not counted (on a CPU, or where workers share GPUs), nobody knows which device a worker uses, and a
node with a suspect is left out as a whole.
"""

import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ft.base.errors import UserError
from ft.platform import devices
from ft.platform.suspects import PULL, read

_FIX = "use another host, or remove the entry from the file if the device has been mended"


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
        path: the file of suspects.
        workers: number of training workers of a node.
        trains: whether this node trains from the start.
        count: number of devices of this node that workers see.
        environment: environment variables of the workers.

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
