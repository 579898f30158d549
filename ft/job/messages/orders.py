"""Orders: control plane -> agents -> workers."""

from dataclasses import dataclass, field

from ft.job.messages.values import Neighbours, Seat, Source


@dataclass(frozen=True)
class Close:
    """``epoch`` is over: every worker in it leaves its operations and reports ``WorkerReleased``."""

    epoch: int
    reason: str


@dataclass(frozen=True)
class Open:
    """A new epoch with its map logical rank (as a string) -> seat.

    ``joiners``: logical ranks whose worker is new to its seat. ``fresh``: all are, and no state is in memory: groups
    connect at once and state comes from the checkpoint folder or the seed.
    ``fired``: numbers of the injected faults that have happened. ``meeting``: host:port of the store in which the
    groups of this epoch meet, on the node of one of its workers.
    """

    epoch: int
    seats: dict[str, Seat]
    joiners: list[int]
    fresh: bool
    fired: list[int] = field(default_factory=list)
    meeting: str = ""


@dataclass(frozen=True)
class Repair:
    """All have left the old epoch and every joiner has arrived: rebuild, restore ``step``, report ``WorkerRepaired``.

    ``rebuild``: names of the groups to build anew now. ``defer``: to be built when first used. All others are kept.
    ``copies``: owner's logical rank -> logical ranks that its peer copies went to up to now. ``rebuilt``: logical ranks
    of stages that nobody has a state of: they have no source, and are rebuilt from their neighbours (CheckFree).
    """

    epoch: int
    step: int
    rebuild: list[str]
    defer: list[str]
    sources: dict[str, Source]
    copies: dict[str, list[int]] = field(default_factory=dict)
    rebuilt: dict[str, Neighbours] = field(default_factory=dict)


@dataclass(frozen=True)
class Resume:
    """All are repaired and the invariants hold: go on after ``step``."""

    epoch: int
    step: int


@dataclass(frozen=True)
class Kill:
    """The agent kills a worker (SIGKILL)."""

    worker: str
    reason: str


@dataclass(frozen=True)
class Spawn:
    """The agent of ``node`` starts workers without a logical rank."""

    node: str
    count: int


@dataclass(frozen=True)
class Restart:
    """Warm restart: agents kill every worker and start new ones; ``number`` counts them. ``seats``: node -> ranks."""

    number: int
    reason: str
    ranks: dict[str, list[int]]


@dataclass(frozen=True)
class GivenUp:
    """``node`` counts as lost. If its agent hears that, it ends its workers, and comes back as another node."""

    node: str
    reason: str


@dataclass(frozen=True)
class Master:
    """What ``MasterChosen`` said, for all agents."""

    number: int
    host: str
    port: int


@dataclass(frozen=True)
class Finish:
    """All workers are done: they exit with 0, then the agents do."""


@dataclass(frozen=True)
class Stop:
    """The run ends: agents kill their workers and exit with ``code``; ``message`` is for the user."""

    code: int
    message: str
