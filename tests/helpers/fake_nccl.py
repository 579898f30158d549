"""A GPU with NCCL communicators, in which the properties that matter for aborts and hangs are torch's and NCCL's.

The names of functions are those of torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp and NCCLUtils.cpp (torch 2.8).
"""

import contextlib
import threading
from collections import defaultdict, deque
from types import SimpleNamespace

import torch
import torch.distributed as dist
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


class RendezvousStore(dist.HashStore):
    def break_off(self) -> None:
        pass


class Members:
    """The ranks that have to join before a communicator is ready; one of them is this process.

    Attributes:
        made: the backends of this process.
        time_is_up: set when TORCH_NCCL_NONBLOCKING_TIMEOUT is over, for all waits.
    """

    def __init__(self, size: int):
        self._missing, self.made, self.time_is_up = size, [], threading.Event()

    def join(self) -> None:
        self._missing -= 1

    @property
    def are_complete(self) -> bool:
        return not self._missing


class MakesCommunicator:
    """``ProcessGroupNCCL`` with non-blocking communicators, as of torch 2.13.

    ``NCCLComm::waitReady`` holds the mutex until the communicator is ready, and ``NCCLComm::abort`` takes it. A wait
    for a launch takes the mutex for each question; once the communicator is aborted, the answer remains
    ``ncclInProgress`` until the limit (``C10D_NCCL_CHECK_TIMEOUT``).

    Attributes:
        connects: whether the other ranks answer when a launch connects to them.
        holds: whether a wait for a launch holds the mutex throughout, as in torch 2.8.
    """

    members: Members

    class Options:
        def __init__(self):
            self.config = SimpleNamespace()

    def __init__(self, store, rank, size, options):
        assert options.config.blocking == 0
        self.options = options
        self.mutex, self.aborted, self.is_made, self.works = threading.Lock(), False, False, []
        self.connects, self.holds = True, False
        self.launched = self.waits = self.polls = 0
        self.gpu = Gpu()

    def eager_connect_single_device(self, device) -> None:
        self.members.join()
        self.members.made.append(self)

    def allreduce(self, tensors, opts=None):
        self._wait_ready()
        if tensors:  # of no elements
            return None
        with self.mutex if self.holds else contextlib.nullcontext():
            self._launch()
        self.launched += 1
        self.works.append(Work(self))
        return self.works[-1]

    def _wait_ready(self) -> None:
        with self.mutex:
            self.waits += 1
            while not self.members.are_complete:
                self._check_limit()

    def _launch(self) -> None:
        while not self.connects:
            with contextlib.nullcontext() if self.holds else self.mutex:
                self.polls += 1
            self._check_limit()

    def _check_limit(self) -> None:
        if self.members.time_is_up.wait(0.005):
            raise RuntimeError("NCCL timeout in: NCCLUtils.cpp")

    def abort(self) -> None:
        with self.mutex:
            self.aborted = True


class Wires:
    """The NCCL communicators of one group whose ranks are threads of this process.

    A message is a rendezvous: it ends when its send and its receive are both at the head of their streams. torch gives
    each communicator one stream: the group's for what is launched together, and another one for each pair of ranks
    whose messages are launched alone (``ProcessGroupNCCL::pointToPoint``), unless the group was connected eagerly.
    """

    def __init__(self, size: int, eager: bool):
        self.eager, self._running = eager, size
        self._streams: dict[tuple, deque[Launch]] = defaultdict(deque)
        self._changed, self._waiting = threading.Condition(), []
        self.deadlock = False
        self.largest = 0

    def communicators(self) -> set[frozenset | str]:
        """Return those that were used: "group", and pairs of ranks."""
        return {communicator for _, communicator in self._streams}

    def put(self, rank: int, communicator: frozenset | str, messages: list[tuple]) -> "Launch":
        """Append a launch, of (kind, tensor, peer) each, to a stream of ``rank``."""
        launch = Launch(self, rank, communicator, messages)
        with self._changed:
            self.largest = max(self.largest, len(messages))
            self._streams[rank, communicator].append(launch)
            while any(self._proceeds(stream[0]) for stream in list(self._streams.values()) if stream):
                pass
            self._changed.notify_all()
        return launch

    def _proceeds(self, launch: "Launch") -> bool:
        for kind, tensor, peer in launch.left:
            there = self._streams[peer, launch.communicator]
            offered = there[0].left if there else []
            other = next((one for one in offered if one[2] == launch.rank and one[0] != kind), None)
            if other is None or any(one[2] == peer and one[0] == kind for one in _before(launch.left, tensor)):
                continue
            source, target = (tensor, other[1]) if kind == "send" else (other[1], tensor)
            target.copy_(source)
            for one, message in ((launch, (kind, tensor, peer)), (there[0], other)):
                one.left = [left for left in one.left if left[1] is not message[1]]
                if not one.left:
                    self._streams[one.rank, one.communicator].popleft()
            return True
        return False

    def wait(self, launch: "Launch") -> None:
        """Block the thread of a rank, as the launch blocks all that its stream does afterwards."""
        with self._changed:
            self._waiting.append(launch)
            self._look()
            self._changed.wait_for(lambda: not launch.left or self.deadlock)
            self._waiting.remove(launch)
            if launch.left:
                raise RuntimeError("NCCL hangs")

    def ends(self) -> None:
        """A rank has come to the end of its program."""
        with self._changed:
            self._running -= 1
            self._look()

    def _look(self) -> None:
        blocked = sum(bool(one.left) for one in self._waiting)
        self.deadlock = self.deadlock or blocked == self._running > 0
        self._changed.notify_all()


def _before(messages: list[tuple], tensor: torch.Tensor) -> list[tuple]:
    return messages[: next(at for at, one in enumerate(messages) if one[1] is tensor)]


class Launch:
    """What was launched at once, and the work of it. ``left``: the messages that have not ended."""

    def __init__(self, wires: Wires, rank: int, communicator: frozenset | str, messages: list[tuple]):
        self._wires, self.rank, self.communicator, self.left = wires, rank, communicator, messages

    def wait(self, timeout=None) -> bool:
        self._wires.wait(self)
        return True

    def is_completed(self) -> bool:
        return not self.left

    def get_future_result(self) -> Future:
        result = Future()
        if not self.left:
            result.set_result(SUCCESS)
        return result


class Messenger:
    """The NCCL backend of one rank."""

    def __init__(self, wires: Wires, rank: int):
        self._wires, self._rank, self._together = wires, rank, None

    def _start_coalescing(self, device) -> None:
        self._together = []

    def _end_coalescing(self, device) -> Launch:
        messages, self._together = self._together, None
        return self._wires.put(self._rank, "group", messages)

    def send(self, tensors, peer, tag):
        return self._message("send", tensors[0], peer)

    def recv(self, tensors, peer, tag):
        return self._message("recv", tensors[0], peer)

    def _message(self, kind: str, tensor: torch.Tensor, peer: int) -> Launch | None:
        message = (kind, tensor.detach(), peer)
        if self._together is not None:
            self._together.append(message)
            return None
        communicator = "group" if self._wires.eager else frozenset((self._rank, peer))
        return self._wires.put(self._rank, communicator, [message])
