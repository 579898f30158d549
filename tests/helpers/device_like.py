"""Collectives that look like NCCL's to the detection of hangs: ``ft run --preload tests.helpers.device_like``.

NCCL's wait returns at once. It makes the current stream wait for the operation (``WorkNCCL::synchronizeStream`` in
torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp: ``ncclEndEvent_->block(currentStream)``), and the training thread
goes on until it reads a value from the device, in ``item()`` or ``synchronize()``. There it blocks, and nobody has been
told.

Imported into the warm pool, this module gives gloo's operations that property: while the training thread is blocked in
one, it does not say so. What is known of the operation is its age, as of an operation on a device.
"""

import time

from ft.state.groups import Groups
from ft.state.groups.state import EpochState


def begins_to_wait(self: EpochState, group: str, work=None) -> None:
    self.on_device, self.awaited = (group, time.monotonic()), work


def has_waited(self: EpochState) -> None:
    self.on_device = self.awaited = None


def oldest_unfinished(self: Groups) -> tuple[str, str, float] | None:
    started = self._state.on_device
    return None if started is None else (started[0], "operation", time.monotonic() - started[1])


EpochState.on_device = None
EpochState.begins_to_wait, EpochState.has_waited = begins_to_wait, has_waited
Groups.oldest_unfinished = oldest_unfinished
