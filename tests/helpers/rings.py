"""Rings of FT-HSDP with all members in one process."""

import contextlib
import os
import threading
from collections.abc import Iterator

from waiting import eventually

from ft.systems.hsdp.ring import Ring, RingOptions

CALM = RingOptions(chunk_bytes=4096, chunks=2, limit_s=20)


@contextlib.contextmanager
def ring_members() -> Iterator:
    """Yield a function that makes rings, in their order; close them, and see that no thread and no socket is left."""
    made: list[Ring] = []
    before = descriptors()

    def make(count: int, options: RingOptions = CALM, token: str = "secret") -> list[Ring]:
        rings = [Ring("127.0.0.1", token, options) for _ in range(count)]
        made.extend(rings)
        return rings

    yield make
    for ring in made:
        ring.close()
    eventually(lambda: not threads() and not descriptors() - before, "a thread or a connection of a ring is left")


def threads() -> list[str]:
    return [each.name for each in threading.enumerate() if each.name.startswith("ft-ring")]


def descriptors() -> set[str]:
    """Return the sockets and pipes of this process."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.add(os.readlink(f"/proc/self/fd/{name}"))
    return {each for each in found if each.startswith(("socket:", "pipe:"))}


def gather(rings: list[Ring], number: int) -> None:
    """Make these rings the members of a quorum."""
    for me, ring in enumerate(rings):
        ring.reconfigure(number, [each.address for each in rings], me)
