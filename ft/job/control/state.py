"""What the control plane knows. Plain values; ``controller.decide`` is the only one who changes them."""

from dataclasses import dataclass, field

from ft.job.control.timeouts import Timeouts
from ft.job.messages import Beat, GroupReport, Repair, WorkerReleased, WorkerRepaired

GATHERING, CLOSED, OPENED = "gathering", "closed", "opened"
REPAIRING, RESUMING, RUNNING, ENDED = "repairing", "resuming", "running", "ended"
"""Phases. gathering: agents and workers of a fresh start come. closed: an epoch is over, its seats are not filled yet.
opened: the next one's seats are known; survivors leave, joiners assemble. repairing: groups and state. resuming: the
first step is about to begin on every worker. running: it has. ended: the run is over."""

EPOCH_OPEN = (OPENED, REPAIRING, RESUMING, RUNNING)
"""Phases in which workers are in an epoch that has not been closed."""


@dataclass(frozen=True)
class Options:
    """What was asked of the run.

    ``nodes``: agents to wait for. ``restarts``: warm restarts before this control plane was started, in the place of
    one that had died. ``hot_swap``: False: every failure leads to a warm restart. ``faults``: that are planned.
    """

    nodes: int
    world_size: int
    max_restarts: int = 3
    restarts: int = 0
    hot_swap: bool = True
    faults: int = 0
    command: list[str] = field(default_factory=list)
    timeouts: Timeouts = field(default_factory=Timeouts)


@dataclass
class Agent:
    """A node. ``beats``: what was last heard of its workers, at ``heard_at``. ``suspect``, ``gone``: why, "" if not.

    ``meeting``: host:port of its store for process groups. ``domains``: kind -> name of its failure domains.
    ``places``: workers that it starts at the start of the run, or at the last warm restart. ``started``: names of all
    workers that it ever started.
    """

    node: str
    node_rank: int
    host: str
    seats: int
    standbys: int
    heard_at: float
    beats: dict[str, Beat] = field(default_factory=dict)
    suspect: str = ""
    gone: str = ""
    meeting: str = ""
    domains: dict[str, str] = field(default_factory=dict)
    places: int = 0
    started: list[str] = field(default_factory=list)


@dataclass
class Worker:
    """A process that lives, for all that is known.

    Attributes:
        meant: logical rank it was started for, None for a standby. since: when it was started.
        rank: logical rank it holds, None while it has no seat. local_rank: its device there.
        empty: it has no state of its own yet. assembled: model and optimizer are built.
        leaves: closed epoch that it has yet to leave, -1 if none. release: what it said when it last left one.
        arrived: its groups, said when it had assembled. repaired: in the present epoch. resumed: the last epoch.
        done: with its work, in the present epoch. left: it has ended with code 0; left_at: when.
    """

    name: str
    node: str
    pid: int
    meant: int | None
    since: float
    address: str = ""
    ready: bool = False
    rank: int | None = None
    local_rank: int = 0
    empty: bool = True
    assembled: bool = False
    leaves: int = -1
    release: WorkerReleased | None = None
    arrived: list[GroupReport] = field(default_factory=list)
    repaired: WorkerRepaired | None = None
    resumed: int = -1
    done: bool = False
    left: bool = False
    left_at: float = 0.0


@dataclass(frozen=True)
class Vacancy:
    """Who held a seat that is empty now, and on which device."""

    worker: str
    node: str
    local_rank: int


@dataclass(frozen=True)
class Suspicion:
    """A worker's operation in ``group`` failed at ``since``."""

    since: float
    group: str
    message: str


@dataclass(frozen=True)
class Place:
    """A logical rank's place in the grid, as its worker said; ``blocks``: transformer layers it holds."""

    pp: int
    tp: int
    dp: int
    cp: int
    blocks: int


@dataclass(frozen=True)
class Incident:
    """A failure that was judged, for the judgement of later ones."""

    at: float
    rank: int | None
    step: int
    action: str
    key: str


@dataclass(frozen=True)
class Return:
    """A time that training went back to committed step ``step``. ``verdicts``: what for, in words. ``fired``: injected
    faults until then."""

    step: int
    verdicts: list[str]
    fired: int


@dataclass
class Recovery:
    """The interruption under way. ``closed``: epoch that it began in; ``ranks``: that failed; ``verdicts``: since the
    last repair, in words, ``in_vain``: all of these are; ``released``: all have left the last closed epoch;
    ``spoiled``: steps whose snapshots turned out unusable, ``unusable``: those by the logical rank that found them so,
    ``unbuildable``: steps that a stage could not be rebuilt at."""

    at: float
    closed: int
    reason: str
    ranks: list[int] = field(default_factory=list)
    verdicts: list[str] = field(default_factory=list)
    in_vain: bool = True
    released: bool = False
    spoiled: list[int] = field(default_factory=list)
    unusable: dict[int, list[int]] = field(default_factory=dict)
    unbuildable: list[int] = field(default_factory=list)


@dataclass
class State:
    """Everything.

    Attributes:
        since: when the phase began. epoch: the newest, -1 before the first. fresh: it began without state in memory.
        attached: a worker has ever attached: the script takes part in recoveries. protected: one has ever trained
            under a guard: from there on state is in memory elsewhere, and faults can be injected.
        seats: logical rank -> worker. vacant: the empty ones. spawning: node -> when workers were ordered there that
            have not been started yet. failed_starts: standbys in a row that ended before they were ready.
        dp_peers, shards: by logical rank, as the workers said. copies: by logical rank, who its peer copies go to;
            complete: ranks whose peer copies hold all of their state. fired: numbers of injected faults that happened.
        checkfree: which lost stages may be rebuilt from their neighbours: "" (none), "middle", or "plus" (the first and
            the last too); places: by logical rank, where that was asked for; rebuilt: stage -> step of the last.
        settings: how the first worker, settings_of, said it was set up.
        suspicions: by worker. step: the last step that is known to be committed. repair: the last one ordered; kept:
            groups it leaves alone. returns: to the step that was gone back to last, with nothing new in between.
            last_recovery: for the status.
    """

    options: Options
    phase: str = GATHERING
    since: float = 0.0
    epoch: int = -1
    fresh: bool = True
    step: int = 0
    restarts: int = 0
    attached: bool = False
    protected: bool = False
    agents: dict[str, Agent] = field(default_factory=dict)
    workers: dict[str, Worker] = field(default_factory=dict)
    seats: dict[int, str] = field(default_factory=dict)
    vacant: dict[int, Vacancy] = field(default_factory=dict)
    spawning: dict[str, list[float]] = field(default_factory=dict)
    failed_starts: int = 0
    dp_peers: dict[int, list[int]] = field(default_factory=dict)
    shards: dict[int, list[str]] = field(default_factory=dict)
    copies: dict[int, list[int]] = field(default_factory=dict)
    complete: dict[int, bool] = field(default_factory=dict)
    checkfree: str = ""
    places: dict[int, Place] = field(default_factory=dict)
    rebuilt: dict[int, int] = field(default_factory=dict)
    fired: list[int] = field(default_factory=list)
    settings: dict[str, str] = field(default_factory=dict)
    settings_of: str = ""
    suspicions: dict[str, Suspicion] = field(default_factory=dict)
    history: list[Incident] = field(default_factory=list)
    repair: Repair | None = None
    kept: int = 0
    recovery: Recovery | None = None
    returns: list[Return] = field(default_factory=list)
    last_recovery: dict[str, str | int | float] = field(default_factory=dict)

    @classmethod
    def begin(cls, options: Options) -> "State":
        """Before anything was heard."""
        return cls(options, restarts=options.restarts)

    def nodes_seen(self) -> int:
        """How many nodes have joined; one whose agent came back under another name is the same."""
        return len({agent.node_rank for agent in self.agents.values()})

    def seated(self) -> list[Worker]:
        """Workers with a seat, by logical rank."""
        return [self.workers[self.seats[rank]] for rank in sorted(self.seats)]

    def standbys(self) -> list[Worker]:
        """Ready workers without a seat, in the order they were started."""
        return [w for w in self.workers.values() if w.ready and w.rank is None and not w.left and w.meant is None]

    def beat(self, worker: Worker) -> Beat | None:
        """What was last heard of it."""
        agent = self.agents.get(worker.node)
        return agent.beats.get(worker.name) if agent is not None else None

    def newest_step(self) -> int:
        """The furthest committed step known of."""
        beats = [beat.step for worker in self.seated() if (beat := self.beat(worker))]
        return max([self.step, *beats])

    def step_time(self) -> float | None:
        """Seconds of the slowest worker's median step, None before one has ended."""
        times = [beat.step_s for worker in self.seated() if (beat := self.beat(worker)) and beat.step_s]
        return max(times, default=None)

    def limits(self) -> Timeouts:
        """The timeouts for the present step time."""
        return self.options.timeouts.calibrated(self.step_time())

    def enter(self, phase: str, now: float) -> None:
        self.phase, self.since = phase, now
