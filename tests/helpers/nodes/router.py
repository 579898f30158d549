"""The network between simulated hosts: a process that owns each host's only interface and forwards packets.

:mod:`nodes.lab` starts it with the number of hosts, the MTU and a seed. Its first line of output names the descriptors
of the hosts' namespaces. Each line of input is ``{"from": [hosts], "to": [hosts], "set": {setting: value}}`` and is
answered by one line. At the end of its input the process ends, and the interfaces with it.
"""

import contextlib
import heapq
import json
import os
import random
import selectors
import sys
import time
from dataclasses import dataclass, replace

from nodes import kernel

NETWORK = "10.77.0"
INTERFACE = "eth0"
_PACKET = 65536
_BATCH = 64
_IPV4, _DESTINATION = 4, 19


@dataclass(frozen=True)
class Way:
    """The treatment of packets from one host to another.

    Attributes:
        blocked: drop all packets.
        loss: share of packets to drop, 0 to 1.
        delay_s: seconds added to every packet.
        rate: bytes per second, 0 for no limit.
        queue_s: maximum seconds that a packet waits because of ``rate``; packets that would wait longer are dropped.
    """

    blocked: bool = False
    loss: float = 0.0
    delay_s: float = 0.0
    rate: float = 0.0
    queue_s: float = 0.5


class Router:
    """Forwards packets between ``interfaces``, one descriptor per host; a host's address ends in its index + 1."""

    def __init__(self, interfaces: list[int], seed: int):
        self._interfaces, self._random = interfaces, random.Random(seed)
        self._ways = {(a, b): Way() for a in range(len(interfaces)) for b in range(len(interfaces))}
        self._free_at = dict.fromkeys(self._ways, 0.0)
        self._waiting: list[tuple[float, int, int, bytes]] = []
        self._count = 0

    def change(self, order: dict) -> None:
        for source in order["from"]:
            for target in order["to"]:
                if source != target:
                    self._ways[source, target] = replace(self._ways[source, target], **order["set"])

    def take(self, source: int) -> None:
        """Forward the packets that ``source`` has sent."""
        for _ in range(_BATCH):
            try:
                packet = os.read(self._interfaces[source], _PACKET)
            except OSError:  # no more packets, or the interface is down
                return
            if packet[0] >> 4 == _IPV4 and 0 <= (target := packet[_DESTINATION] - 1) < len(self._interfaces):
                self._pass_on(source, target, packet)

    def release(self) -> float:
        """Deliver packets that have waited long enough; return the seconds until the next one is due."""
        now = time.monotonic()
        while self._waiting and self._waiting[0][0] <= now:
            _, _, target, packet = heapq.heappop(self._waiting)
            self._deliver(target, packet)
        return max(0.0, self._waiting[0][0] - now) if self._waiting else 3600.0

    def _pass_on(self, source: int, target: int, packet: bytes) -> None:
        way = self._ways[source, target]
        if way.blocked or (way.loss and self._random.random() < way.loss):
            return
        if not way.rate and not way.delay_s:
            self._deliver(target, packet)
            return
        due = now = time.monotonic()
        if way.rate:
            begins = max(now, self._free_at[source, target])
            if begins > now + way.queue_s:
                return
            due = self._free_at[source, target] = begins + len(packet) / way.rate
        self._count += 1
        heapq.heappush(self._waiting, (due + way.delay_s, self._count, target, packet))

    def _deliver(self, target: int, packet: bytes) -> None:
        with contextlib.suppress(OSError):  # its interface is down, or its queue is full: the packet is lost
            os.write(self._interfaces[target], packet)


def make_host(index: int, mtu: int) -> tuple[int, int]:
    """Return (descriptor of a new namespace, descriptor of its interface); this process stays in its own namespace."""
    home = os.open("/proc/self/ns/net", os.O_RDONLY)
    kernel.unshare(kernel.NEW_NETWORK)
    try:
        namespace, interface = os.open("/proc/self/ns/net", os.O_RDONLY), kernel.open_tun(INTERFACE)
        kernel.ip("link", "set", "lo", "up")
        kernel.ip("address", "add", f"{NETWORK}.{index + 1}/24", "dev", INTERFACE)
        kernel.ip("link", "set", INTERFACE, "mtu", str(mtu), "up")
    finally:
        kernel.enter_network(home)
        os.close(home)
    return namespace, interface


def main() -> None:
    hosts, mtu, seed = (int(text) for text in sys.argv[1:])
    kernel.die_with_parent()
    made = [make_host(index, mtu) for index in range(hosts)]
    print(json.dumps([namespace for namespace, _ in made]), flush=True)
    router = Router([interface for _, interface in made], seed)
    selector = selectors.DefaultSelector()
    selector.register(0, selectors.EVENT_READ, None)
    for index, (_, interface) in enumerate(made):
        selector.register(interface, selectors.EVENT_READ, index)
    while True:
        for key, _ in selector.select(router.release()):
            if key.data is not None:
                router.take(key.data)
                continue
            line = sys.stdin.readline()
            if not line:
                return
            router.change(json.loads(line))
            print("done", flush=True)


if __name__ == "__main__":
    main()
