"""Observations: single values that a node reports about itself, and how much its counters grew between two readings."""

from collections.abc import Mapping
from dataclasses import dataclass, field

GAUGE, COUNTER, EVENT = "gauge", "counter", "event"
"""Kinds of observations: a present value, a count that only grows until it is reset, and something that happened."""


@dataclass(frozen=True)
class Observation:
    """One value that a node reports about itself.

    Attributes:
        node: name of the node.
        device: name of the device, such as "gpu0", "mlx5_0/1" or "nvme0"; "" for the node as a whole.
        name: what was observed, such as "gpu.temperature".
        value: the value, in ``unit``.
        unit: "C", "W", "s", "bytes", or "" for counts and yes/no (1/0).
        when: wall time of the observation, or of the event, in seconds since 1970.
        kind: GAUGE, COUNTER or EVENT.
        text: for an event, the line in which it was reported, otherwise further explanation or "".
    """

    node: str
    device: str
    name: str
    value: float
    unit: str
    when: float
    kind: str = GAUGE
    text: str = ""


@dataclass(frozen=True)
class Reading:
    """All observations of one node at one moment.

    Attributes:
        node: name of the node.
        when: wall time in seconds since 1970.
        observations: the observations, by source.
        unreadable: source -> why it cannot be read here.
        aliases: other names of devices, such as PCI addresses and the ids of GPUs -> name of the device.
    """

    node: str
    when: float
    observations: tuple[Observation, ...] = ()
    unreadable: Mapping[str, str] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)

    def id_of(self, device: str) -> str:
        """Return the unique id of a GPU ("GPU-5c2f..."), or "" if it is not known."""
        return next((alias for alias, name in self.aliases.items() if name == device and alias.startswith("GPU-")), "")


@dataclass(frozen=True)
class Change:
    """The growth of one counter between two readings.

    Attributes:
        now: the later observation.
        grew: how much the counter has grown; its whole value if it was reset in between, as by a new driver.
        seconds: time between the two readings.
    """

    now: Observation
    grew: float
    seconds: float


def differences(before: Reading | None, now: Reading) -> list[Change]:
    """Return the growth of each counter that both readings have, in the order of the later one.

    Args:
        before: the earlier reading; None: there is none, and the list is empty.
        now: the later reading.
    """
    if before is None:
        return []
    was = {(o.device, o.name): o for o in before.observations if o.kind == COUNTER}
    found = []
    for later in now.observations:
        earlier = was.get((later.device, later.name))
        if later.kind == COUNTER and earlier is not None:
            grew = later.value - earlier.value
            found.append(Change(later, later.value if grew < 0 else grew, later.when - earlier.when))
    return found
