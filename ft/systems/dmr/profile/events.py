"""Data classes of the DMR profiler: the events of one rank in one iteration, and their durations.

An event is an executed operator or a wait for other ranks. From the waits the profile derives the *windows*, times in
which DMR (dual modular redundancy, SpareTrain) can execute operators a second time.
"""

from dataclasses import dataclass, field

from ft.systems.dmr.plan.trace import INTER, Place

P2P = INTER[0]


@dataclass(slots=True)
class ExecutedOperator:
    """An operator that has been executed. Tensors are identified by the number of their storage, so that all views of a
    storage have the same number.

    Args:
        name: name of the operator, as in ``ft.systems.dmr.runtime.operators.OperatorProperties``.
        place: stage, microbatch, layer, phase and chunk.
        index: number of the operator in its unit (phase, chunk, microbatch), from 0.
        ins: storages that it read.
        outs: storages of its results, without storages that existed before.
        changes: storages that it wrote in place, and storages that a collective writes before the next operator.
        rng: True if the operator draws from a random generator.
        segment: number of the activation-checkpointing segment that it belongs to; None if it belongs to none.
    """

    name: str
    place: Place
    index: int
    ins: tuple[int, ...] = ()
    outs: tuple[int, ...] = ()
    changes: list[int] = field(default_factory=list)
    rng: bool = False
    segment: int | None = None

    @property
    def unit(self) -> tuple[str, int, int]:
        return self.place.phase, self.place.chunk, self.place.microbatch

    @property
    def key(self) -> tuple:
        """Return the key of the event, which is the same in every iteration."""
        return (*self.unit, self.index, self.name)


@dataclass(frozen=True, slots=True)
class RecordedWait:
    """A wait for other ranks.

    Attributes:
        kind: kind of the window, one of ``INTER`` and ``INTRA`` in ``ft.systems.dmr.plan.trace``.
        number: number of the wait among the waits of this kind in the iteration, from 0.
        dynamic: True if the duration differs in every iteration.
    """

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
    """One storage: the block of memory that a tensor and its views share.

    Attributes:
        bytes: its size in bytes.
        freed: number of the first event that began after the storage was freed; None if it outlived the iteration.
    """

    bytes: int
    freed: int | None = None


@dataclass
class IterationRecord:
    """The full record of an iteration on one rank.

    Attributes:
        events: the events, in order.
        memory: the storages, by number.
        live: bytes in use after each event.
    """

    events: list[Event] = field(default_factory=list)
    memory: list[Memory] = field(default_factory=list)
    live: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Timed:
    """The times of one event.

    Attributes:
        gap_us: time between the previous event and this one, in microseconds.
        us: duration of the event, in microseconds.
    """

    gap_us: float
    us: float


@dataclass(frozen=True)
class StageRecord:
    """The record of one pipeline stage, from which the profile is assembled.

    Attributes:
        stage: number of the stage.
        notes: the full record of an iteration.
        times: the times of ``notes.events``, in order.
    """

    stage: int
    notes: IterationRecord
    times: tuple[Timed, ...]
