"""A GPU with NCCL communicators, in which the properties that matter for aborts and hangs are torch's and NCCL's.

The names of functions are those of torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp and NCCLUtils.cpp (torch 2.8).
"""

import threading
import time

import torch
from torch.futures import Future

SUCCESS, COMM_ERROR = 0, 2
LIMIT_S = 5.0


class Gpu:
    """The device of one process.

    Attributes:
        hung: communicators whose kernels wait for another rank.
        flagged: communicators whose abort flag is set, so that their kernels end.
    """

    def __init__(self):
        self.hung: set[Nccl] = set()
        self.flagged: set[Nccl] = set()
        self.changed = threading.Condition()


class Nccl:
    """One ``ProcessGroupNCCL`` with its communicator.

    ``abort`` sets the communicator's flag, and then waits for all kernels of the device, as the release of a
    communicator's memory does. So it ends when the flags of all hung communicators are set. ``_group_start`` and
    ``_group_end`` change nothing about that: groups of NCCL are thread-local, and ``ProcessGroupNCCL::abort`` runs
    ``abortComms`` in a thread of its own (``std::async``).
    """

    def __init__(self, gpu: Gpu):
        self.gpu, self.works, self.broken = gpu, [], ""
        self.aborts = 0

    def _group_start(self) -> None:
        pass

    _group_end = _group_start

    def hang(self) -> None:
        self.gpu.hung.add(self)

    def allreduce(self, tensors, opts=None):
        """As ``collective``: a work for an asynchronous operation, nothing for a synchronous one."""
        if opts == "sync":
            return None
        self.works.append(Work(self))
        return self.works[-1]

    def abort(self) -> None:
        self.aborts += 1
        if self.broken:
            raise RuntimeError(self.broken)
        with self.gpu.changed:
            self.gpu.flagged.add(self)
            self.gpu.changed.notify_all()
            if not self.gpu.changed.wait_for(lambda: self.gpu.hung <= self.gpu.flagged, LIMIT_S):
                raise RuntimeError("ProcessGroup abort timed out: kernels of another communicator run")

    @property
    def running(self) -> bool:
        return self in self.gpu.hung and self not in self.gpu.flagged


class Work:
    """One ``WorkNCCL``."""

    def __init__(self, nccl: Nccl):
        self._nccl, self._error, self._result = nccl, None, Future()
        self.finished = False

    def fail(self, error: Exception) -> None:
        """As ``checkAndSetException``."""
        self._error = error
        self._result.set_result(COMM_ERROR)

    def finish(self) -> None:
        """The kernel ends, and the watchdog notices it (``Watchdog::runLoop``)."""
        self.finished = True
        self._result.set_result(SUCCESS)

    def wait(self, timeout=None) -> bool:
        """As ``WorkNCCL::wait``: it makes the current stream wait, and returns at once."""
        return True

    def is_completed(self) -> bool:
        """As ``WorkNCCL::isCompleted``: ``exception() || finishedGPUExecutionInternal()``."""
        return self._error is not None or self.finished or self._nccl in self._nccl.gpu.flagged

    def is_success(self) -> bool:
        raise NotImplementedError("WorkNCCL::isSuccess() is deprecated")

    def exception(self):
        return self._error

    def get_future_result(self) -> Future:
        return self._result


class Event:
    """A CUDA event; all events of the test's device have passed once ``passed`` is set."""

    passed = threading.Event()

    def __init__(self, blocking: bool = False):
        pass

    def record(self, stream=None) -> None:
        pass

    def query(self) -> bool:
        return self.passed.is_set()

    def synchronize(self) -> None:
        assert self.passed.wait(LIMIT_S), "the device has hung for too long"


class Stream:
    cuda_stream = 0


def take_over_torch(monkeypatch) -> None:
    """Make ``torch.cuda`` answer for the fake device."""
    Event.passed = threading.Event()
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


def eventually(holds) -> None:
    """Wait until ``holds()``."""
    deadline = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)
