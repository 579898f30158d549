"""What one rank did in one iteration, in order: operators, and waits for others."""

from dataclasses import dataclass, field

from ft.systems.dmr.plan.trace import INTER, Place

P2P = INTER[0]


@dataclass(slots=True)
class Done:
    """An operator has been executed. Tensors are numbers, by the memory they lie in: views of one memory are one.

    Args:
        name: as ``ft.systems.dmr.runtime.operators.Nature`` has it. index: its number in its unit.
        ins, outs: what it read, and what of its results lies in memory of its own. changes: what it wrote in place, and
            what a collective writes before the next operator.
        segment: the activation-checkpointing segment that it belongs to.
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
        """What is the same in every iteration."""
        return (*self.unit, self.index, self.name)


@dataclass(frozen=True, slots=True)
class Waited:
    """The rank has waited for others. ``kind``: of the window; number: of this kind's waits in the iteration."""

    kind: str
    number: int
    dynamic: bool = False

    @property
    def key(self) -> tuple:
        """What is the same in every iteration."""
        return self.kind, self.number


Event = Done | Waited


@dataclass(slots=True)
class Memory:
    """Of one tensor. ``freed``: number of the event that began when it was gone; None: it outlived the iteration."""

    bytes: int
    freed: int | None = None


@dataclass
class Notes:
    """A whole iteration. ``live``: bytes in use after each event."""

    events: list[Event] = field(default_factory=list)
    memory: list[Memory] = field(default_factory=list)
    live: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Timed:
    """An event's time before it, since the one before, and its own, in microseconds."""

    gap_us: float
    us: float


@dataclass(frozen=True)
class StageRecord:
    """One pipeline stage's iteration: ``times`` belong to ``notes.events``."""

    stage: int
    notes: Notes
    times: tuple[Timed, ...]
