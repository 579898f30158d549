"""Aborts NCCL communicators together.

``ncclCommAbort`` of one communicator may wait for kernels of another one: NCCL's documentation asks for the aborts of
all communicators of a device within one group. A group of NCCL belongs to one thread, and ``ProcessGroupNCCL.abort``
makes its own in a new thread (``abortCommsFromMap``). So the aborts of several backends are called at the same time,
each from a thread of its own.
"""

import threading
import time
from collections.abc import Iterable

import torch.distributed as dist

from ft.base.errors import FtError
from ft.state.groups.device import DEVICE

LIMIT_S = 10.0
"""Longest wait for aborts, in seconds. It is shorter than the limit for leaving an epoch (``Timeouts.drain_s``)."""


class AbortError(FtError):
    """A communicator was not aborted, so that its device may still write into buffers: this process must end."""


class Abort:
    """The abort of one NCCL backend, in a thread of its own. It begins at once."""

    def __init__(self, backend: dist.Backend, name: str):
        self._name, self._error = name, None
        DEVICE.aborts_begin()
        self._thread = threading.Thread(target=self._run, args=(backend,), name="ft-abort", daemon=True)
        self._thread.start()

    def _run(self, backend: dist.Backend) -> None:
        try:
            backend.abort()
        except Exception as error:
            self._error = error
        finally:
            DEVICE.aborts_ended()

    def problem(self, within_s: float) -> str | None:
        """Wait for the end for at most ``within_s`` seconds. Return why the communicator may still run, or None."""
        self._thread.join(within_s)
        if self._thread.is_alive():
            return f"the abort of {self._name} did not end"
        return None if self._error is None else f"the abort of {self._name} failed: {str(self._error).strip()}"


def finish(aborts: Iterable[Abort]) -> None:
    """Wait for all aborts, for at most ``LIMIT_S`` seconds together.

    Raises:
        AbortError: one has failed, or has not ended. All others were waited for.
    """
    deadline = time.monotonic() + LIMIT_S
    found = [abort.problem(max(0.0, deadline - time.monotonic())) for abort in aborts]
    problems = [problem for problem in found if problem is not None]
    if problems:
        raise AbortError(f"after {LIMIT_S:g} s: " + "; ".join(problems))
