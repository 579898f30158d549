"""The check that a standby runs while it waits: it computes, copies and sends itself a message, again now and then.

A standby is a warm worker without a logical rank, which takes the place of a worker that died. The check runs in a
thread of the lowest priority and takes a fraction of a second. A standby that fails it reports that its node cannot
continue, and gets no logical rank. It uses the processor, the host memory and the network; a standby has no GPU yet.
"""

import contextlib
import os
import threading
from collections.abc import Callable

import numpy

from ft.base.errors import ReplaceNodeError
from ft.net.checksum import checksum

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
        seed: seed of the data.
        multiply: function that multiplies two matrices.
        copy: function that copies an array.

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
    if checksum(memoryview(data)) != checksum(memoryview(copy(data))):
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
