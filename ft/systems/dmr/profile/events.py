"""The events of one rank in one iteration, in order: executed operators, and waits for other ranks."""

from dataclasses import dataclass, field

from ft.systems.dmr.plan.trace import INTER, Place

P2P = INTER[0]


@dataclass(slots=True)
class Done:
    """An operator that has been executed. Tensors are identified by the number of their storage, so that views of one
    storage have one number.

    Args:
        name: name of the operator, as in ``ft.systems.dmr.runtime.operators.Nature``.
        place: stage, microbatch, layer, phase and chunk.
        index: number of the operator in its unit.
        ins: storages that it read.
        outs: storages of its results, without those that existed before.
        changes: storages that it wrote in place, and those that a collective writes before the next operator.
        rng: the operator draws from a random generator.
        segment: number of the activation-checkpointing segment that it belongs to.
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
        """Return what identifies the event in every iteration."""
        return (*self.unit, self.index, self.name)


@dataclass(frozen=True, slots=True)
class Waited:
    """A wait for other ranks.

    Attributes:
        kind: kind of the window.
        number: number of the wait among those of this kind in the iteration.
        dynamic: its duration differs in every iteration.
    """

    kind: str
    number: int
    dynamic: bool = False

    @property
    def key(self) -> tuple:
        """Return what identifies the event in every iteration."""
        return self.kind, self.number


Event = Done | Waited


@dataclass(slots=True)
class Memory:
    """One storage. ``bytes``: its size. ``freed``: number of the event before whose beginning it was freed; None if it
    outlived the iteration."""

    bytes: int
    freed: int | None = None


@dataclass
class Notes:
    """The record of a whole iteration.

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
    """The time between an event and the previous one, and the duration of the event, in microseconds."""

    gap_us: float
    us: float


@dataclass(frozen=True)
class StageRecord:
    """The iteration of one pipeline stage. ``times``: the durations of ``notes.events``."""

    stage: int
    notes: Notes
    times: tuple[Timed, ...]
