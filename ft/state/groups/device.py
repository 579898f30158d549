"""Observes operations on a GPU without getting in the way of an abort, or of a thread that waits for the device.

While a communicator is aborted, torch holds the communicator's mutex (``NCCLComm::abort``, NCCLUtils.cpp), and
``Work.is_completed`` of one of its works waits for that mutex without releasing the interpreter lock
(``WorkNCCL::isCompleted`` and ``NCCLComm::isAborted``; the binding in init.cpp releases nothing). The abort itself may
wait for aborts that other threads of this process have yet to begin, and these threads need the interpreter lock. So a
single question during an abort could block the process. ``Device.asks`` prevents that.

The question also queries a CUDA event, and torch's authors have seen such queries hang while another thread waited for
the device (``WorkNCCL::finishedGPUExecutionInternal``, ProcessGroupNCCL.cpp). So a thread that must never block, such
as the one for heartbeats, learns about the end of operations without any call to CUDA:

- for operations with a work, from torch's watchdog, a thread that needs no interpreter lock: it queries each work every
  100 ms and sets the work's "future result" (``Watchdog::runLoop``);
- for operations that torch puts onto the current stream without returning a work (``ProcessGroupNCCL::collective`` with
  ``asyncOp`` false), from a thread of this module, which waits for events and releases the interpreter lock meanwhile.
"""

import contextlib
import math
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ft.base.step_clock import CLOCK

_SUCCESS = 0  # WorkResult::SUCCESS, torch/csrc/distributed/c10d/Work.hpp
_PERIOD_S = 0.05
# In each period, the thread waits for events about so many times; each wait hands the interpreter lock over once.
_WAITS = 8
_SHARE = 0.003
_MOST_APART = 100
"""At least every hundredth step is measured."""
_MOST_FREE = 20_000

Place = tuple[int, torch.cuda.Event]
"""A stream, and an event that was recorded on it."""


@dataclass(frozen=True)
class DeviceMark:
    """An event behind an operation that is on a stream.

    Attributes:
        group: name of the group.
        operation: name of the operation.
        began: monotonic time at which the program started the operation.
        stream: the stream.
        event: the event.
    """

    group: str
    operation: str
    began: float
    stream: torch.cuda.Stream
    event: torch.cuda.Event


class Device:
    """The GPU of this process, as its groups see it. There is one such object per process, ``DEVICE``."""

    def __init__(self) -> None:
        self._lock, self._aborting = threading.Lock(), 0
        self._marks: deque[DeviceMark] = deque()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    # --- works --------------------------------------------------------------------------------------------------------

    def asks(self, question: Callable[[], bool]) -> bool:
        """Return ``question()``, a query of a work or event; False, without asking, while an abort is under way."""
        with self._lock:
            return not self._aborting and question()

    def has_seen_the_end_of(self, work: dist.Work) -> bool:
        """Return whether torch's watchdog has seen that ``work`` has ended without an error, about 0.1 s late.

        A work of a backend whose watchdog does not tell is asked itself.
        """
        watched: Any = work  # torch's stub lacks the method
        try:
            result = watched.get_future_result()
        except RuntimeError:  # ``Work::getFutureResult``: not implemented
            return self.asks(work.is_completed)
        return bool(result.done() and result.value() == _SUCCESS)

    def aborts_begin(self) -> None:
        """Answer no further question, until ``aborts_ended`` was called as often as this."""
        with self._lock:
            self._aborting += 1

    def aborts_ended(self) -> None:
        with self._lock:
            self._aborting -= 1

    # --- operations without a work ------------------------------------------------------------------------------------

    def mark(self, group: str, operation: str, began: float) -> None:
        """Record an event behind an operation on the current stream, and watch for it."""
        # A wait for an event of this kind blocks the thread; a wait for another kind occupies a core.
        stream, event = torch.cuda.current_stream(), torch.cuda.Event(blocking=True)
        event.record(stream)
        self._marks.append(DeviceMark(group, operation, began, stream, event))
        if self._thread is None:
            self._stop.clear()
            device = torch.cuda.current_device()
            self._thread = threading.Thread(target=self._watch, args=(device,), name="ft-device", daemon=True)
            self._thread.start()

    def oldest_marked(self) -> DeviceMark | None:
        """Return the oldest operation whose end was not seen yet, about ``_PERIOD_S`` late, or None.

        Several operations are waited for together. Until the last of them has ended, the first counts as unfinished.
        """
        try:
            return self._marks[0]
        except IndexError:
            return None

    def marked(self) -> set[tuple[str, float]]:
        """Return (group, start in monotonic time) of each operation whose end was not seen yet."""
        return {(mark.group, mark.began) for mark in list(self._marks)}

    def stop(self, limit_s: float) -> None:
        """End the thread, if it ends within ``limit_s`` seconds. The next mark starts it again."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(limit_s)
            self._thread = None
        self._marks.clear()

    def _watch(self, device: int) -> None:
        torch.cuda.set_device(device)  # otherwise CUDA creates a context on GPU 0 for this thread
        while not self._stop.wait(_PERIOD_S):
            marks = list(self._marks)
            size = max(1, len(marks) // _WAITS)
            for start in range(0, len(marks), size):
                part = marks[start : start + size]
                # Events on one stream pass in order, so the last one of each stream suffices.
                for event in {mark.stream.cuda_stream: mark.event for mark in part}.values():
                    with contextlib.suppress(RuntimeError):  # the device has failed; the program's calls say so
                        event.synchronize()
                for _ in part:
                    with contextlib.suppress(IndexError):  # ``stop`` has removed them
                        self._marks.popleft()


DEVICE = Device()


class Stalls:
    """Measures how long this process's GPU waits for other ranks, without ever waiting for the GPU (``STALLS``).

    The host starts operations of a group and goes on, so its own time does not show who waits. The GPU does: its stream
    stands still where it waits for an operation of NCCL. An event is recorded before and after that place, and the time
    between the two is read when both have passed, at the end of the step or of a later one.

    Recording and reading costs the host some microseconds for each operation. Where that would be more than ``_SHARE``
    of a step, because a step has thousands of operations, only every second, third, ... step is measured.
    """

    def __init__(self) -> None:
        self._pairs: list[tuple[str, int, torch.cuda.Event, torch.cuda.Event]] = []
        self._free: deque[torch.cuda.Event] = deque(maxlen=_MOST_FREE)
        self._cost_s = 0.0
        self._until_next = 0
        self.cut: Callable[[float], Callable[[], Mapping[str, float] | None] | None] = self._cut

    def begins(self, trains: bool) -> Place | None:
        """Record an event on the current stream, before a place where it may wait for other ranks.

        Args:
            trains: whether the calling thread belongs to training.

        Returns:
            what :meth:`ends` needs; None if nothing is measured now.
        """
        if not trains or self._until_next or not CLOCK.is_running or torch.cuda.is_current_stream_capturing():
            return None
        began = time.perf_counter()
        CLOCK.cut_device = self.cut
        place = self._record(torch.cuda.current_stream())
        self._cost_s += time.perf_counter() - began
        return place

    def ends(self, group: str, before: Place | None) -> None:
        """Record an event after the place. ``group``: name of the process group. ``before``: from :meth:`begins`."""
        if before is None:
            return
        began = time.perf_counter()
        stream, event = before
        now, after = self._record(torch.cuda.current_stream())
        if now == stream:
            self._pairs.append((group, stream, event, after))
        self._cost_s += time.perf_counter() - began

    def _record(self, stream: torch.cuda.Stream) -> Place:
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        event.record(stream)
        return stream.cuda_stream, event

    def _cut(self, step_s: float) -> Callable[[], Mapping[str, float] | None] | None:
        """End a step; see :data:`ft.base.step_clock.CutDevice`.

        Only the stream counts on which the training thread is now: a wait of another stream need not stop this one.
        """
        if self._until_next:
            self._until_next -= 1
            return None
        own = torch.cuda.current_stream().cuda_stream
        pairs, self._pairs = [pair for pair in self._pairs if pair[1] == own], []
        cost_s, self._cost_s = self._cost_s, 0.0
        apart = math.ceil(cost_s / (_SHARE * step_s)) if step_s > 0.0 else 1
        self._until_next = min(max(apart, 1), _MOST_APART) - 1
        waiting, seconds = deque(pairs), defaultdict[str, float](float)
        return lambda: self._read(waiting, seconds)

    def _read(
        self, waiting: deque[tuple[str, int, torch.cuda.Event, torch.cuda.Event]], seconds: dict[str, float]
    ) -> Mapping[str, float] | None:
        """Return the seconds of a step by group, or None if the GPU has not come to its end or is being aborted."""
        began = time.perf_counter()
        try:
            while waiting:
                group, _, before, after = waiting[0]
                if not DEVICE.asks(after.query):
                    return None
                seconds[group] += before.elapsed_time(after) / 1e3
                waiting.popleft()
                self._free.extend((before, after))
        except RuntimeError:  # the device has failed; the program's calls say so
            return None
        finally:
            self._cost_s += time.perf_counter() - began
        return seconds


STALLS = Stalls()
