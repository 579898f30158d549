"""Exhaustion of a worker's resources: the process lowers its own limits, so that the kernel refuses further
allocations.
"""

import os
import resource
import threading
from pathlib import Path

from ft.faults.faults import Fault

_ROOM = 64 << 20
"""Bytes of address space that remain after the limit is lowered."""
_PIECE = 1 << 20
"""Bytes of one allocation."""
_FILES_LEFT = 16
"""File descriptors that remain after the limit is lowered."""


def memory(fault: Fault) -> None:
    """Use up the address space.

    Raises:
        MemoryError: always. Its traceback keeps the allocated memory alive, so the shortage lasts as long as the error.
    """
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    _lower(resource.RLIMIT_AS, pages * resource.getpagesize() + _ROOM)
    taken = []
    while True:
        taken.append(bytearray(_PIECE))


def files(fault: Fault) -> None:
    """Use up the file descriptors, for the rest of the life of the process.

    Raises:
        OSError: always, with EMFILE.
    """
    used = max(map(int, os.listdir("/proc/self/fd")))
    _lower(resource.RLIMIT_NOFILE, used + _FILES_LEFT)
    while True:
        os.open(os.devnull, os.O_RDONLY)


def disk(fault: Fault) -> None:
    """Let no file of this process grow for ``fault.seconds``: writes fail with EFBIG, similar to ENOSPC on a full
    disk.
    """
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    timer = threading.Timer(fault.seconds, resource.setrlimit, (resource.RLIMIT_FSIZE, before))
    timer.daemon = True
    timer.start()


def read(fault: Fault) -> None:
    """Read from an address that the kernel cannot read.

    Raises:
        OSError: always, with EIO.
    """
    with open("/proc/self/mem", "rb", buffering=0) as file:
        file.read(1)  # address 0, which is never mapped


def _lower(limit: int, value: int) -> None:
    hard = resource.getrlimit(limit)[1]
    resource.setrlimit(limit, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))
