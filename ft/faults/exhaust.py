"""Resources of a worker that run out: its limits are lowered, and then the kernel itself refuses."""

import os
import resource
import threading
from pathlib import Path

from ft.faults.faults import Fault

_ROOM = 64 << 20
_PIECE = 1 << 20
_FILES_LEFT = 16


def memory(fault: Fault) -> None:
    """Uses the address space up.

    Raises:
        MemoryError: that is done; what was taken is held by the traceback, so the shortage lasts as long as the error.
    """
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    _lower(resource.RLIMIT_AS, pages * resource.getpagesize() + _ROOM)
    taken = []
    while True:
        taken.append(bytearray(_PIECE))


def files(fault: Fault) -> None:
    """Uses the file descriptors up, for as long as the process lives.

    Raises:
        OSError: EMFILE: that is done.
    """
    used = max(map(int, os.listdir("/proc/self/fd")))
    _lower(resource.RLIMIT_NOFILE, used + _FILES_LEFT)
    while True:
        os.open(os.devnull, os.O_RDONLY)


def disk(fault: Fault) -> None:
    """No file of this process may grow for ``fault.seconds``: writes fail with EFBIG, as with ENOSPC on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    timer = threading.Timer(fault.seconds, resource.setrlimit, (resource.RLIMIT_FSIZE, before))
    timer.daemon = True
    timer.start()


def read(fault: Fault) -> None:
    """Reads where the kernel cannot.

    Raises:
        OSError: EIO.
    """
    with open("/proc/self/mem", "rb", buffering=0) as file:
        file.read(1)  # address 0, which is never mapped


def _lower(limit: int, value: int) -> None:
    hard = resource.getrlimit(limit)[1]
    resource.setrlimit(limit, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))
