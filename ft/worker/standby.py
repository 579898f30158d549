"""What a standby does while it waits for a logical rank: it checks its node, and keeps memory ready.

What a recovery costs beyond a fixed time is work on memory, and most of it is the first touch of each page: the kernel
has to find and zero it, which takes far longer than to write to a page that is there. So a standby touches as much
memory as the worker of a logical rank needs, of whichever rank; what it then builds and fetches goes into these pages.
"""

import contextlib
import ctypes
import mmap
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy

from ft.base.errors import ReplaceNodeError
from ft.job.messages import Reserve
from ft.net.framed import checksum
from ft.state.snapshot.buffers import Spare

PERIOD_S = 600.0
"""Seconds after which a standby that still waits is checked again."""
_SIZE, _COPY_BYTES = 384, 16 << 20
_TRIES = 3
_LOWEST = 19


def examine(
    reach: Callable[[], None],
    seed: int = 0,
    multiply: Callable[[numpy.ndarray, numpy.ndarray], numpy.ndarray] = numpy.matmul,
    copy: Callable[[numpy.ndarray], numpy.ndarray] = numpy.copy,
) -> None:
    """Compute, copy and communicate, and compare every result with the one that is right.

    Args:
        reach: function that sends this process a message over its own data-plane address; it raises OSError if the
            message does not arrive.

    Raises:
        ReplaceNodeError: a result is wrong, or no message arrives in several tries.
    """
    draw = numpy.random.default_rng(seed)
    # Sums of products of small whole numbers are exact in float32, in whatever order a library adds them up. So a
    # difference is a fault of the machine, and not one of rounding.
    left, right = (draw.integers(-8, 9, (_SIZE, _SIZE)).astype(numpy.float32) for _ in range(2))
    first, second = multiply(left, right), multiply(left, right)
    if first.tobytes() != second.tobytes():
        raise ReplaceNodeError("the check of a standby failed: a product of matrices differs when it is computed twice")
    if not numpy.array_equal(first.sum(axis=0, dtype=numpy.float64), left.sum(axis=0, dtype=numpy.float64) @ right):
        raise ReplaceNodeError("the check of a standby failed: a product of matrices is wrong")
    data = draw.integers(0, 256, _COPY_BYTES, dtype=numpy.uint8)
    if checksum(data.data) != checksum(copy(data).data):
        raise ReplaceNodeError(f"the check of a standby failed: a copy of {_COPY_BYTES >> 20} MiB has another checksum")
    _reach(reach)


def _reach(reach: Callable[[], None]) -> None:
    """Try to reach this process several times: a machine under load, or one that was stopped, may miss a time limit."""
    for number in range(1, _TRIES + 1):
        try:
            reach()
            return
        except OSError as error:
            if number == _TRIES:
                said = f"the check of a standby failed: {_TRIES} messages to itself were lost: {error}"
                raise ReplaceNodeError(said) from error


class Admission:
    """Checks this standby while it waits for a logical rank.

    Args:
        reach: see :func:`examine`.
        failed: function that is called, in another thread, with the error of a failed check.
        period_s: seconds between two checks.
        check: the check: a function of ``reach`` and a seed.
    """

    def __init__(
        self,
        reach: Callable[[], None],
        failed: Callable[[ReplaceNodeError], None],
        period_s: float = PERIOD_S,
        check: Callable[[Callable[[], None], int], None] = examine,
    ):
        self._reach, self._failed, self._period_s, self._check = reach, failed, period_s, check
        self._over = threading.Event()

    def start(self) -> None:
        """Begin to check, in another thread."""
        threading.Thread(target=self._go_on, name="ft-admission", daemon=True).start()

    def stop(self) -> None:
        """Begin no further check, and ignore the result of one that is under way."""
        self._over.set()

    def _go_on(self) -> None:
        with contextlib.suppress(OSError):  # on Linux this is the priority of this thread alone
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST)
        seed = 0
        while not self._over.is_set():
            try:
                self._check(self._reach, seed)
            except ReplaceNodeError as error:
                if not self._over.is_set():
                    self._failed(error)
                return
            seed += 1
            self._over.wait(self._period_s)


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4
"""Parameters of glibc's mallopt(3)."""
_USUAL = {_M_MMAP_MAX: 65536, _M_MMAP_THRESHOLD: 32 << 20, _M_TRIM_THRESHOLD: 64 << 20}
"""What glibc's own adjustment of the thresholds comes to in a process that frees large blocks."""
_PIECE = 16 << 20
PAUSE_S = 0.02
"""Seconds between two pieces of memory, so that training on the same node keeps its CPUs."""


class ReadyMemory:
    """Memory that a standby has touched before it needs it: a part of its heap, and one file for a snapshot.

    glibc takes large blocks from the kernel, and gives them back, one by one. While a standby keeps memory ready it
    takes them from the heap instead, and gives nothing back: a block that was touched and freed serves all that is
    allocated later. With another allocator in place of glibc's, the touched memory is of no use, and does no harm.

    Args:
        available: function that returns how many bytes of memory the node has left.
    """

    def __init__(self, available: Callable[[], int] | None = None):
        self._available = available or available_memory
        self._libc: Any = None
        self._block = self._size = self._touched = 0
        self._spare: Spare | None = None
        self._is_enough = False

    @property
    def is_wanted(self) -> bool:
        """Return whether memory is wanted that is not there yet."""
        return self._lacking() > 0

    def want(self, order: Reserve) -> str:
        """Begin to keep the memory of ``order`` ready, if the node can spare twice as much; say what is done."""
        need = order.heap + order.snapshot
        if need == 0 or self._libc is not None or self._spare is not None:
            return ""
        if (left := self._available()) < 2 * need:
            return f"no memory is kept ready: {_mib(need)} are needed, and the node has {_mib(left)} left"
        if order.heap:
            self._begin_heap(order.heap)
        if order.snapshot:
            with contextlib.suppress(OSError):
                self._spare = Spare(order.snapshot)
        return f"kept ready for a logical rank: {_mib(order.heap)} of heap, {_mib(order.snapshot)} for a snapshot"

    def touch(self) -> None:
        """Touch the next piece, unless others have taken the node's memory meanwhile; then no more is wanted."""
        if self._available() < 2 * self._lacking():
            self._size, self._is_enough = self._touched, True
        elif self._touched < self._size:
            length = min(_PIECE, self._size - self._touched)
            ctypes.memset(self._block + self._touched, 0, length)
            self._touched += length
        elif self._spare is not None:
            self._spare.touch(_PIECE)

    def take(self) -> Spare | None:
        """Let all that is allocated from now on have the memory. Return that for a snapshot, if there is any."""
        if self._block:
            self._libc.free(self._block)
        self._block = self._size = self._touched = 0
        spare, self._spare = self._spare, None
        return spare

    def end(self) -> None:
        """Let the allocator work as usual again, once all that a logical rank needs has its memory."""
        if self._libc is not None:
            for parameter, value in _USUAL.items():
                self._libc.mallopt(parameter, value)
            self._libc = None

    def _lacking(self) -> int:
        """Return the bytes that are wanted and not touched yet."""
        spare = 0 if self._spare is None or self._is_enough else self._spare.nbytes - self._spare.touched
        return self._size - self._touched + spare

    def _begin_heap(self, nbytes: int) -> None:
        libc = ctypes.CDLL(None)
        if not hasattr(libc, "mallopt"):
            return
        libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = _POINTER, [ctypes.c_size_t], [_POINTER]
        libc.madvise.argtypes = [_POINTER, ctypes.c_size_t, ctypes.c_int]
        self._libc = libc
        libc.mallopt(_M_MMAP_MAX, 0)
        libc.mallopt(_M_TRIM_THRESHOLD, -1)
        self._block = libc.malloc(nbytes) or 0
        if self._block:
            self._size = nbytes
            begin = -(-self._block // _HUGE) * _HUGE
            libc.madvise(begin, max(0, self._block + nbytes - begin) // _HUGE * _HUGE, mmap.MADV_HUGEPAGE)


_POINTER = ctypes.c_void_p
_HUGE = 2 << 20


def _mib(nbytes: int) -> str:
    return f"{nbytes >> 20} MiB"


_CGROUP = Path("/sys/fs/cgroup")


def available_memory(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = _CGROUP) -> int:
    """Return the bytes of memory that the node, or the container of this process, has left without swapping."""
    left = [int(line.split()[1]) << 10 for line in meminfo.read_text().splitlines() if line.startswith("MemAvailable:")]
    with contextlib.suppress(OSError, ValueError):  # "max": no limit
        left.append(int((cgroup / "memory.max").read_text()) - int((cgroup / "memory.current").read_text()))
    return min(left, default=0)


def private_memory() -> int:
    """Return the bytes of memory that this process has touched, without those of files and of shared memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:")), 0)
