"""The torch dispatch mode of the DMR profiler: record every dispatched operator and every wait for other ranks.

DMR (dual modular redundancy, SpareTrain) executes operators a second time, if possible in *windows*, times in which the
rank waits for communication.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ft.systems.dmr.plan.trace import IN_UNITS, Place
from ft.systems.dmr.profile.events import P2P, Event, ExecutedOperator, IterationRecord, RecordedWait, Timed
from ft.systems.dmr.profile.stopwatch import Stopwatch
from ft.systems.dmr.profile.storages import Storages
from ft.systems.dmr.runtime.cursor import ExecutionCursor
from ft.systems.dmr.runtime.operators import OperatorProperties, is_counted, properties_of, tensors_in
from ft.systems.dmr.runtime.redundant import written


class Recorder(TorchDispatchMode):
    """Measures the durations of operators and waits. If ``takes_notes`` is True, it also records the tensors that
    operators use and the memory in use, which is slow.

    Operators are counted as in ``ft.systems.dmr.runtime.mode.DoubleExecution``, the mode that verifies operators, so
    that an operator has the same id in the profile and in a run that follows a plan.

    Args:
        course: the position of this rank in the iteration.
        stage: pipeline stage of this rank.
        watch: measures the durations.
        storages: returns a new object that observes the memory of one iteration.

    Attributes:
        segment: the activation-checkpointing segment that is being executed; None outside of all segments.
        again: True while that segment is being recomputed.
        is_passing: True while operators belong to a call that runs verify as a whole; they are not recorded.
        counts: always empty; ``DoubleExecution`` counts verified operators here.
        takes_notes: True if the next iteration is recorded in full.
        notes: record of the last iteration that was recorded in full.
        keys: keys of the events of the last iteration.
    """

    def __init__(self, course: ExecutionCursor, stage: int, watch: Stopwatch, storages: Callable[[], Storages]):
        super().__init__()
        self._course, self._stage, self._watch, self._make_storages = course, stage, watch, storages
        self.takes_notes = False
        self.notes = IterationRecord()
        self.restart()

    def restart(self) -> None:
        """Begin an iteration."""
        self.segment: object | None = None
        self.again = self.is_passing = False
        self.counts: dict[str, int] = {}
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
        kwargs = kwargs or {}
        if self.is_passing:
            return func(*args, **kwargs)
        self._watch.pause()
        kind = properties_of(func)
        if is_counted(kind, args, kwargs):
            return self._execute(kind, func, args, kwargs)
        if kind.communicates and self._storages is not None:
            self._overwrites(tensors_in(written(kind, args, kwargs)))
        self._watch.go()
        out = func(*args, **kwargs)
        self._watch.pause()
        if self._storages is not None:
            for tensor in tensors_in(out):
                self._storages.number(tensor)
        self._watch.go()
        return out

    def waits(self, kind: str, *, dynamic: bool = False) -> None:
        """Record that the rank begins to wait for other ranks. A wait within another wait is not recorded.

        Args:
            kind: kind of the window, one of ``INTER`` and ``INTRA`` in ``ft.systems.dmr.plan.trace``.
            dynamic: True if the duration differs in every iteration.
        """
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

    def _execute(self, kind: OperatorProperties, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        unit, index = self._course.count()
        self._begins()
        self._watch.begin()
        out = func(*args, **kwargs)
        self._watch.end()
        place = Place(self._stage, unit.microbatch, self._course.layer, unit.phase, unit.chunk)
        done = ExecutedOperator(kind.name, place, index)
        if self._storages is not None:
            self._describe(done, kind, args, kwargs, out)
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

    def _describe(
        self, done: ExecutedOperator, kind: OperatorProperties, args: Sequence[Any], kwargs: dict[str, Any], out: Any
    ) -> None:
        done.ins = self._numbers(tensors_in((args, kwargs)))
        done.changes = list(self._numbers(tensors_in(written(kind, args, kwargs))))
        before = len(self._storages.memory)
        done.outs = tuple(number for number in self._numbers(tensors_in(out)) if number >= before)
        done.rng = kind.random
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
