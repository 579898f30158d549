"""What the control plane knows. Plain values; ``controller.decide`` is the only one who changes them."""

from dataclasses import dataclass, field

from ft.control.timeouts import Timeouts
from ft.messages import Beat, GroupReport, Holdings, Repair, WorkerRepaired

GATHERING, RUNNING, CLOSED, OPENED, REPAIRING, ENDED = (
    "gathering",
    "running",
    "closed",
    "opened",
    "repairing",
    "ended",
)
"""Phases. gathering: workers of a fresh start come. closed: an epoch is over and seats are not filled yet. opened: the
next one's seats are known; survivors leave, joiners assemble. repairing: groups and state."""


@dataclass
class Options:
    """What was asked of the run."""

    nodes: int
    world_size: int
    max_restarts: int = 3
    restarts: int = 0
    command: list[str] = field(default_factory=list)
    timeouts: Timeouts = field(default_factory=Timeouts)


@dataclass
class Agent:
    node: str
    node_rank: int
    host: str
    seats: int
    standbys: int
    last_beat: float
    suspect: bool = False


@dataclass
class Worker:
    """A process. ``rank``: the logical rank it was started for. ``killed``: an order to kill it is out.

    ``released``, ``arrived``, ``resumed``: epochs that it last left, assembled for, went on in. ``released_at``: the
    step it had committed when it left.
    """

    name: str
    node: str
    pid: int
    rank: int | None
    address: str = ""
    ready: bool = False
    killed: bool = False
    exit_code: int | None = None
    released: int = -1
    released_at: int = 0
    arrived: int = -1
    groups: list[GroupReport] = field(default_factory=list)
    holdings: Holdings = field(default_factory=Holdings)
    repaired: WorkerRepaired | None = None
    resumed: int = -1
    done: bool = False
    local_rank: int = 0

    @property
    def lives(self) -> bool:
        return self.exit_code is None and not self.killed


@dataclass
class State:
    """Everything. ``deadline``: of the phase, None without one; ``since``: when it began."""

    options: Options
    phase: str = GATHERING
    since: float = 0.0
    deadline: float | None = None
    epoch: int = -1
    step: int = 0
    restarts: int = 0
    agents: dict[str, Agent] = field(default_factory=dict)
    workers: dict[str, Worker] = field(default_factory=dict)
    beats: dict[str, tuple[float, Beat]] = field(default_factory=dict)
    seats: dict[int, str] = field(default_factory=dict)
    joiners: set[int] = field(default_factory=set)
    previous: dict[int, str] = field(default_factory=dict)
    fresh_ranks: dict[str, list[int]] = field(default_factory=dict)
    dp_peers: dict[int, list[int]] = field(default_factory=dict)
    shards: dict[int, list[str]] = field(default_factory=dict)
    repair: Repair | None = None
    fired: list[int] = field(default_factory=list)
    protected: bool = False
    standbys_asked: bool = False
    transient: dict[int, list[float]] = field(default_factory=dict)
    software: dict[str, int] = field(default_factory=dict)
    leaving: int = 0
    suspicion: tuple[float, str, str, str] | None = None
    spawning: int = 0
    recovering: bool = False
    reported_release: bool = False
    kept: int = 0
    empty: set[int] = field(default_factory=set)

    def limits(self) -> Timeouts:
        """The timeouts for the step time that the workers report."""
        times = [
            beat.step_s for name in self.seats.values() if (got := self.beats.get(name)) and (beat := got[1]).step_s
        ]
        return self.options.timeouts.calibrated(max(times) if times else None)

    def rank_of(self, worker: str) -> int | None:
        return next((rank for rank, name in self.seats.items() if name == worker), None)

    def standbys(self) -> list[Worker]:
        """Ready workers without a seat, in the order they were started."""
        seated = set(self.seats.values())
        return [w for w in self.workers.values() if w.ready and w.lives and w.name not in seated]
