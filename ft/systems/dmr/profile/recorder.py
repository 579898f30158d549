"""Record one iteration of training for a DMR profile: its operators, tensors, communication and storages, with times.

An event is an executed operator or a wait for other ranks, from which the profile derives the windows. Both are
recorded as they will be in the profile, without their times, which are measured in other iterations. A tensor of the
profile is a storage, so that all views of a storage have the same id. The times at which training frees a storage are
observed, because a verification that is executed later keeps the tensors of an operator in memory until then. Durations
are without the time of the profiler itself.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from msgspec.structs import replace
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from ft.systems.dmr.plan.trace import IN_UNITS, INTER, Operator, Window
from ft.systems.dmr.runtime.cursor import ExecutionCursor, operator_id
from ft.systems.dmr.runtime.operators import Call, call_of, is_counted, tensors_in, written

P2P = INTER[0]


@dataclass(slots=True)
class Storage:
    """One storage: the block of memory that a tensor and its views share. ``freed``: number of the first event that
    began after the storage was freed; None if it outlived the iteration."""

    bytes: int
    freed: int | None = None


@dataclass(frozen=True)
class Timed:
    """Microseconds between the previous event and this one, and of the event itself."""

    gap_us: float
    us: float


@dataclass
class StageRecord:
    """The full record of an iteration on one pipeline stage: the events in order, without start and duration; the
    storages by id; the bytes in use after each event; and, once they are measured, the times of the events."""

    stage: int
    events: list[Operator | Window] = field(default_factory=list)
    memory: dict[str, Storage] = field(default_factory=dict)
    live: list[int] = field(default_factory=list)
    times: Sequence[Timed] = ()


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
    """The storages of one iteration: the size of each and when it was freed, by id.

    Args:
        state: tensors that exist before the iteration and outlive it.
        in_use: returns the bytes in use on the device; None to add up the storages that have an id.
        stage: pipeline stage of this rank, which is part of ids.
    """

    def __init__(self, state: Iterable[torch.Tensor], in_use: Callable[[], int] | None = None, stage: int = 0):
        self.memory: dict[str, Storage] = {}
        self._live: dict[int, tuple[StorageWeakRef, str]] = {}
        self._lasting: dict[int, str] = {}
        self._state = {storage._cdata: storage.nbytes() for storage in map(_storage, state) if storage is not None}
        self._in_use, self._bytes, self._stage = in_use, sum(self._state.values()), stage

    def known(self, tensor: torch.Tensor) -> str | None:
        """Return the id of the storage of ``tensor``; None if it has none yet."""
        storage = _storage(tensor)
        if storage is None:
            return None
        key = storage._cdata
        return self._live[key][1] if key in self._live else self._lasting.get(key)

    def ids(self, tensors: Iterable[torch.Tensor]) -> tuple[str, ...]:
        """Return the ids of the storages of ``tensors``, each once; a new storage gets one."""
        found = (self.known(tensor) or self._new(tensor) for tensor in tensors)
        return tuple(dict.fromkeys(one for one in found if one is not None))

    def _new(self, tensor: torch.Tensor) -> str | None:
        storage = _storage(tensor)
        if storage is None:
            return None
        key, name = storage._cdata, f"s{self._stage}.t{len(self.memory)}"
        self.memory[name] = Storage(storage.nbytes())
        if key in self._state:
            self._lasting[key] = name
        else:
            # The weak reference prevents the address, which is the key, from being reused for another storage.
            self._live[key] = StorageWeakRef(storage), name
            self._bytes += storage.nbytes()
        return name

    def sweep(self, event: int) -> None:
        """Record which storages have been freed since the last call. ``event``: number of the event that begins now."""
        gone = [key for key, (reference, _) in self._live.items() if reference.expired()]
        for key in gone:
            _, name = self._live.pop(key)
            self.memory[name].freed = event
            self._bytes -= self.memory[name].bytes

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

    Operators are counted as in ``ft.systems.dmr.runtime.mode.DoubleExecutionMode``, the mode that verifies operators,
    so that an operator has the same id in the profile and in a run that follows a plan.

    Attributes:
        segment: the activation-checkpointing segment that is being executed; None outside of all segments.
        again: True while that segment is being recomputed.
        is_passing: True while operators belong to a call that runs verify as a whole; they are not recorded.
        notes: record of the last iteration that was recorded in full.
        keys: keys of the events of the last iteration: the id of a wait; id and name of an operator, because experts
            get other tokens in each iteration, so that another operator may have the same id.
    """

    def __init__(self, cursor: ExecutionCursor, watch: HostStopwatch, storages: Callable[[], Storages], stage: int = 0):
        super().__init__()
        self._cursor, self._watch, self._make_storages, self._stage = cursor, watch, storages, stage
        self.takes_notes = False
        self.notes = StageRecord(stage)
        self.restart()

    def restart(self) -> None:
        """Begin an iteration."""
        self.segment: object | None = None
        self.again = self.is_passing = False
        self.keys: list[tuple] = []
        self._waits: dict[str, int] = {}
        self._segments: dict[int, tuple[object, int]] = {}
        self._waiting: Window | None = None
        self._storages = self._make_storages() if self.takes_notes else None
        if self._storages is not None:
            self.notes = StageRecord(self._stage, memory=self._storages.memory)
        self._used: set[str] = set()
        self._last: int | None = None
        self._watch.restart()

    def times(self) -> dict[tuple, Timed]:
        """Return the times of all events of the last iteration, by their keys."""
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
            self._storages.ids(tensors_in(out))
        self._watch.go()
        return out

    def waits(self, kind: str, *, dynamic: bool = False) -> None:
        """Record that the rank begins to wait for other ranks, in a window of a kind. A wait within another wait is not
        recorded. ``dynamic``: True if the duration differs in every iteration."""
        if self._waiting is not None:
            return
        self._watch.pause()
        if kind != P2P and self._cursor.unit.phase not in IN_UNITS:
            kind = "dp"
        number = self._waits.get(kind, 0)
        self._waits[kind] = number + 1
        self._waiting = Window(f"s{self._stage}.{kind}.{number}", 0.0, 0.0, kind, self._stage, dynamic)
        self._begins()
        self._watch.begin()

    def waited(self) -> None:
        """Record the end of the wait."""
        if self._waiting is None:
            return
        self._watch.end()
        event, self._waiting = self._waiting, None
        self._note(key_of(event), lambda: event)
        self._watch.go()

    def _execute(self, call: Call) -> Any:
        unit, index = self._cursor.count()
        self._begins()
        self._watch.begin()
        out = call.func(*call.args, **call.kwargs)
        self._watch.end()
        identity = operator_id(self._stage, unit.phase, unit.chunk, unit.microbatch, index)
        self._note((identity, call.kind.name), lambda: self._described(identity, call, out))
        self._watch.go()
        return out

    def _begins(self) -> None:
        if self._storages is not None:
            self._storages.sweep(len(self.notes.events))

    def _note(self, key: tuple[str, ...], event: Callable[[], Operator | Window]) -> None:
        self.keys.append(key)
        if self._storages is not None:
            self.notes.events.append(event())
            self.notes.live.append(self._storages.in_use())

    def _described(self, identity: str, call: Call, out: Any) -> Operator:
        storages, unit = self._storages, self._cursor.unit
        ins = storages.ids(tensors_in((call.args, call.kwargs)))
        # results in storages that existed before are none that executing the operator again would make
        outs = storages.ids([tensor for tensor in tensors_in(out) if storages.known(tensor) is None])
        segment = None
        if self.segment is not None:
            _, number = self._segments.setdefault(id(self.segment), (self.segment, len(self._segments)))
            segment = f"s{self._stage}.ac{number}"
        self._used.update(ins, outs)
        self._last = len(self.notes.events)
        return Operator(
            identity,
            call.kind.name,
            unit.phase,
            start_us=0.0,
            t_us=0.0,
            in_ids=ins,
            out_ids=outs,
            stage=self._stage,
            microbatch=unit.microbatch,
            layer=self._cursor.layer,
            chunk=unit.chunk,
            mutates=storages.ids(tensors_in(written(call))),
            rng=call.kind.random,
            ac_segment=segment,
        )

    def _overwrites(self, tensors: Iterable[torch.Tensor]) -> None:
        """Record that a collective writes to ``tensors``. A profile does not list collectives, so the change is
        attributed to the last operator before the collective."""
        if self._last is not None:
            last = self.notes.events[self._last]
            changed = [name for tensor in tensors if (name := self._storages.known(tensor)) in self._used]
            self.notes.events[self._last] = replace(last, mutates=tuple(dict.fromkeys((*last.mutates, *changed))))


def key_of(event: Operator | Window) -> tuple[str, ...]:
    """Return the key of an event in ``Recorder.keys``, which is the same in every iteration."""
    return (event.id, event.name) if isinstance(event, Operator) else (event.id,)
