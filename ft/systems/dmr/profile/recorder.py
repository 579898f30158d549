"""Record one iteration of training for a DMR profile: its operators, tensors, communication and storages, with times.

An event is an executed operator or a wait for other ranks, from which the profile derives the windows. The times at
which training frees a storage are observed, because a verification that is executed later keeps the tensors of an
operator in memory until then. Durations are without the time of the profiler itself.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from ft.systems.dmr.plan.trace import IN_UNITS, INTER
from ft.systems.dmr.runtime.cursor import ExecutionCursor, OperatorCall
from ft.systems.dmr.runtime.operators import Call, call_of, is_counted, tensors_in, written

P2P = INTER[0]


@dataclass(slots=True)
class ExecutedOperator:
    """An operator that has been executed. Tensors are identified by the number of their storage, so that all views of a
    storage have the same number.

    Attributes:
        outs: storages of its results, without storages that existed before.
        changes: storages that it wrote in place, and storages that a collective writes before the next operator.
        segment: number of the activation-checkpointing segment that it belongs to.
    """

    at: OperatorCall
    ins: tuple[int, ...] = ()
    outs: tuple[int, ...] = ()
    changes: list[int] = field(default_factory=list)
    rng: bool = False
    segment: int | None = None

    @property
    def key(self) -> tuple:
        """Return the key of the event, which is the same in every iteration."""
        return (*self.at.unit, self.at.index, self.at.operator)


@dataclass(frozen=True, slots=True)
class RecordedWait:
    """A wait for other ranks, of a kind of window, with its number among the waits of this kind in the iteration, from
    0. ``dynamic``: True if the duration differs in every iteration."""

    kind: str
    number: int
    dynamic: bool = False

    @property
    def key(self) -> tuple:
        """Return the key of the event, which is the same in every iteration."""
        return self.kind, self.number


Event = ExecutedOperator | RecordedWait


@dataclass(slots=True)
class Memory:
    """One storage: the block of memory that a tensor and its views share. ``freed``: number of the first event that
    began after the storage was freed; None if it outlived the iteration."""

    bytes: int
    freed: int | None = None


@dataclass
class IterationRecord:
    """The full record of an iteration on one rank: the events in order, the storages by number, and the bytes in use
    after each event."""

    events: list[Event] = field(default_factory=list)
    memory: list[Memory] = field(default_factory=list)
    live: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Timed:
    """Microseconds between the previous event and this one, and of the event itself."""

    gap_us: float
    us: float


@dataclass(frozen=True)
class StageRecord:
    """The record of one pipeline stage, from which the profile is assembled. ``times``: the times of ``notes.events``,
    in order."""

    stage: int
    notes: IterationRecord
    times: tuple[Timed, ...]


class HostStopwatch:
    """Measures the durations of the events (operators and waits) of one iteration by the host's clock, for CPUs, on
    which an operator has been computed when its call returns. Time between ``pause`` and ``go`` does not count."""

    def restart(self) -> None:
        """Begin an iteration: forget all events, and start counting time."""
        self._counted, self._events, self._last = 0.0, [], 0.0
        self._since = time.perf_counter()

    def pause(self) -> None:
        self._counted += time.perf_counter() - self._since

    def go(self) -> None:
        self._since = time.perf_counter()

    def begin(self) -> None:
        """Begin an event, and start counting time."""
        self._began = self._counted
        self._since = time.perf_counter()

    def end(self) -> None:
        """End the event, and stop counting time."""
        self.pause()
        self._events.append((self._began - self._last, self._counted - self._began))
        self._last = self._counted

    def times(self) -> list[Timed]:
        """Return the times of all events, in order."""
        return [Timed(gap * 1e6, own * 1e6) for gap, own in self._events]


class DeviceStopwatch(HostStopwatch):
    """Stopwatch by CUDA events on the current stream. The time between two operators counts as zero, because it is time
    of the host, which runs ahead of a busy device."""

    def restart(self) -> None:
        self._pairs: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def pause(self) -> None: ...

    def go(self) -> None: ...

    def begin(self) -> None:
        self._start = torch.cuda.Event(enable_timing=True)
        self._start.record()

    def end(self) -> None:
        ended = torch.cuda.Event(enable_timing=True)
        ended.record()
        self._pairs.append((self._start, ended))

    def times(self) -> list[Timed]:
        torch.cuda.synchronize()
        return [Timed(0.0, began.elapsed_time(ended) * 1e3) for began, ended in self._pairs]


def stopwatch(device: torch.device) -> HostStopwatch:
    """Return the stopwatch for operators of a device."""
    return DeviceStopwatch() if device.type == "cuda" else HostStopwatch()


class Storages:
    """The storages of one iteration: the size of each and when it was freed, by number.

    Args:
        state: tensors that exist before the iteration and outlive it.
        in_use: returns the bytes in use on the device; None to add up the storages that were numbered.
    """

    def __init__(self, state: Iterable[torch.Tensor], in_use: Callable[[], int] | None = None):
        self.memory: list[Memory] = []
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}
        self._lasting: dict[int, int] = {}
        self._state = {storage._cdata: storage.nbytes() for storage in map(_storage, state) if storage is not None}
        self._in_use, self._bytes = in_use, sum(self._state.values())

    def number(self, tensor: torch.Tensor) -> int | None:
        """Return the number of the storage of ``tensor``; None if it has none."""
        storage = _storage(tensor)
        if storage is None:
            return None
        key = storage._cdata
        if key in self._live:
            return self._live[key][1]
        if key in self._lasting:
            return self._lasting[key]
        number = len(self.memory)
        self.memory.append(Memory(storage.nbytes()))
        if key in self._state:
            self._lasting[key] = number
        else:
            # The weak reference prevents the address, which is the key, from being reused for another storage.
            self._live[key] = StorageWeakRef(storage), number
            self._bytes += storage.nbytes()
        return number

    def is_known(self, tensor: torch.Tensor) -> bool:
        """Return whether the storage of ``tensor`` already has a number."""
        storage = _storage(tensor)
        return storage is not None and (storage._cdata in self._live or storage._cdata in self._lasting)

    def sweep(self, event: int) -> None:
        """Record which storages have been freed since the last call. ``event``: number of the event that begins now."""
        gone = [key for key, (reference, _) in self._live.items() if reference.expired()]
        for key in gone:
            _, number = self._live.pop(key)
            self.memory[number].freed = event
            self._bytes -= self.memory[number].bytes

    def in_use(self) -> int:
        """Return the bytes in use now."""
        return self._bytes if self._in_use is None else self._in_use()


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    try:
        return tensor.untyped_storage()
    except NotImplementedError:  # sparse tensors, for example, have none
        return None


class Recorder(TorchDispatchMode):
    """Measures the durations of operators and waits. If ``takes_notes`` is True, it also records the tensors that
    operators use and the memory in use, which is slow.

    Operators are counted as in ``ft.systems.dmr.runtime.mode.DoubleExecution``, the mode that verifies operators, so
    that an operator has the same id in the profile and in a run that follows a plan.

    Attributes:
        segment: the activation-checkpointing segment that is being executed; None outside of all segments.
        again: True while that segment is being recomputed.
        is_passing: True while operators belong to a call that runs verify as a whole; they are not recorded.
        notes: record of the last iteration that was recorded in full.
        keys: keys of the events of the last iteration.
    """

    def __init__(self, course: ExecutionCursor, watch: HostStopwatch, storages: Callable[[], Storages]):
        super().__init__()
        self._course, self._watch, self._make_storages = course, watch, storages
        self.takes_notes = False
        self.notes = IterationRecord()
        self.restart()

    def restart(self) -> None:
        """Begin an iteration."""
        self.segment: object | None = None
        self.again = self.is_passing = False
        self.keys: list[tuple] = []
        self._waits: dict[str, int] = {}
        self._segments: dict[int, tuple[object, int]] = {}
        self._waiting: RecordedWait | None = None
        self._storages = self._make_storages() if self.takes_notes else None
        if self._storages is not None:
            self.notes = IterationRecord(memory=self._storages.memory)
        self._used: set[int] = set()
        self._last: ExecutedOperator | None = None
        self._watch.restart()

    def times(self) -> dict[tuple, Timed]:
        """Return the times of all events of the last iteration, by the key of the event."""
        return dict(zip(self.keys, self._watch.times(), strict=True))

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Tell ``torch.compile`` to compile as it does in the run that is to be planned."""
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        call = call_of(func, args, kwargs)
        if self.is_passing:
            return func(*args, **call.kwargs)
        self._watch.pause()
        if is_counted(call):
            return self._execute(call)
        if call.kind.communicates and self._storages is not None:
            self._overwrites(tensors_in(written(call)))
        self._watch.go()
        out = func(*args, **call.kwargs)
        self._watch.pause()
        if self._storages is not None:
            for tensor in tensors_in(out):
                self._storages.number(tensor)
        self._watch.go()
        return out

    def waits(self, kind: str, *, dynamic: bool = False) -> None:
        """Record that the rank begins to wait for other ranks, in a window of a kind. A wait within another wait is not
        recorded. ``dynamic``: True if the duration differs in every iteration."""
        if self._waiting is not None:
            return
        self._watch.pause()
        if kind != P2P and self._course.unit.phase not in IN_UNITS:
            kind = "dp"
        number = self._waits.get(kind, 0)
        self._waits[kind] = number + 1
        self._waiting = RecordedWait(kind, number, dynamic)
        self._begins()
        self._watch.begin()

    def waited(self) -> None:
        """Record the end of the wait."""
        if self._waiting is None:
            return
        self._watch.end()
        event, self._waiting = self._waiting, None
        self._note(event)
        self._watch.go()

    def _execute(self, call: Call) -> Any:
        _, index = self._course.count()
        self._begins()
        self._watch.begin()
        out = call.func(*call.args, **call.kwargs)
        self._watch.end()
        done = ExecutedOperator(self._course.at(call.kind.name, index))
        if self._storages is not None:
            self._describe(done, call, out)
        self._note(done)
        self._watch.go()
        return out

    def _begins(self) -> None:
        if self._storages is not None:
            self._storages.sweep(len(self.notes.events))

    def _note(self, event: Event) -> None:
        self.keys.append(event.key)
        if self._storages is not None:
            self.notes.events.append(event)
            self.notes.live.append(self._storages.in_use())

    def _describe(self, done: ExecutedOperator, call: Call, out: Any) -> None:
        done.ins = self._numbers(tensors_in((call.args, call.kwargs)))
        done.changes = list(self._numbers(tensors_in(written(call))))
        before = len(self._storages.memory)
        done.outs = tuple(number for number in self._numbers(tensors_in(out)) if number >= before)
        done.rng = call.kind.random
        if self.segment is not None:
            _, done.segment = self._segments.setdefault(id(self.segment), (self.segment, len(self._segments)))
        self._used.update(done.ins, done.outs)
        self._last = done

    def _overwrites(self, tensors: Iterable[torch.Tensor]) -> None:
        """Record that a collective writes to ``tensors``. A profile does not list collectives, so the change is
        attributed to the last operator before the collective."""
        known = [tensor for tensor in tensors if self._storages.is_known(tensor)]
        if self._last is not None:
            self._last.changes += [n for n in self._numbers(known) if n in self._used and n not in self._last.changes]

    def _numbers(self, tensors: Iterable[torch.Tensor]) -> tuple[int, ...]:
        found = (self._storages.number(tensor) for tensor in tensors)
        return tuple(dict.fromkeys(number for number in found if number is not None))
